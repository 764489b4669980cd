"""Context parallelism: which tokens of each sequence a rank has, and how it gets the keys and values of the others.

Every sequence is cut into 2 x size chunks, and rank r takes chunks r and 2 x size - 1 - r (zigzag): under a causal
mask early chunks see few keys and late ones many, and such a pair sees as many as any other. Everything but attention
is local to a token. Attention gathers keys and values of the whole row and computes the rank's own queries at their
true positions.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor


class ContextShare:
    """One rank's share of a row of sequences laid end to end.

    Args:
        tokens: of the whole row.
        seq_length: of one sequence; ``2 * size`` divides it.
        rank: this context-parallel rank.
        size: context-parallel ranks.

    Attributes:
        segments: first and one-past-last token of each stretch of the row that is this rank's, in order.
    """

    def __init__(self, tokens: int, seq_length: int, rank: int, size: int) -> None:
        chunks = 2 * size
        self._chunk = seq_length // chunks
        sequences = tokens // seq_length
        # What the ranks hold one after the other, as chunk numbers of the whole row.
        held = [
            [sequence * chunks + chunk for sequence in range(sequences) for chunk in (r, chunks - 1 - r)]
            for r in range(size)
        ]
        gathered = [chunk for of_rank in held for chunk in of_rank]
        self._place = [gathered.index(chunk) for chunk in range(sequences * chunks)]
        self.segments: list[tuple[int, int]] = []
        for chunk in held[rank]:
            first, last = chunk * self._chunk, (chunk + 1) * self._chunk
            if self.segments and self.segments[-1][1] == first:
                first = self.segments.pop()[0]
            self.segments.append((first, last))

    def take(self, whole: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor ``[tokens, ...]``."""
        return torch.cat([whole[first:last] for first, last in self.segments])

    def gather(self, mine: Tensor) -> Tensor:
        """Returns all ranks' rows ``[tokens, ...]`` in the order of the row (a collective over the context group).

        Backward sums each row's gradient over the ranks and returns this rank's part (reduce-scatter).
        """
        group = parallel_state.get_context_parallel_group()
        chunks = gather_from_sequence_parallel_region(mine.contiguous(), group=group).split(self._chunk)
        return torch.cat([chunks[place] for place in self._place])


def context_share(tokens: int, seq_length: int) -> ContextShare | None:
    """Returns this rank's share of a row, or None without context parallelism."""
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return None
    return ContextShare(tokens, seq_length, parallel_state.get_context_parallel_rank(), size)
