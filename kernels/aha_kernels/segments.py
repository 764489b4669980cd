"""Cuts one attention call into independent segments: a batch item, or one document of a packed row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aha_kernels.errors import InputError


@dataclass(frozen=True)
class Segment:
    """Queries ``row_start .. row_stop - 1`` of one batch item, which see keys ``key_start .. key_stop - 1`` only.

    ``first_position`` is the position of the first query relative to ``key_start``; it is never negative, because
    queries before the first key see nothing and belong to no segment.
    """

    batch: int
    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    first_position: int

    @property
    def num_rows(self) -> int:
        """Number of queries."""
        return self.row_stop - self.row_start

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return self.key_stop - self.key_start


def _segment(
    batch: int, row_start: int, row_stop: int, position: int, key_start: int, key_stop: int
) -> Segment:
    """One segment; ``position`` of the first query counts from key 0. Rows and keys that meet nothing are cut."""
    skipped = max(0, key_start - position)
    row_start, position = row_start + skipped, position + skipped
    key_stop = min(key_stop, position + row_stop - row_start)  # later keys lie in the future of every query
    return Segment(batch, row_start, row_stop, key_start, key_stop, position - key_start)


def check_documents(cu_seqlens: Tensor, num_tokens: int) -> list[int]:
    """Returns the document borders as a list, or raises InputError when they do not run from 0 to num_tokens."""
    borders = cu_seqlens.tolist()
    if not borders or borders[0] != 0 or borders[-1] != num_tokens:
        ends = f"{borders[0]} to {borders[-1]}" if borders else "nothing"
        raise InputError(
            f"cu_seqlens runs from {ends}, but must run from 0 to the number of tokens, {num_tokens}"
        )
    for left, right in zip(borders, borders[1:], strict=False):
        if right < left:
            raise InputError(f"cu_seqlens must not decrease, but {right} follows {left}")
    return borders


def split_segments(
    batch: int,
    num_queries: int,
    num_keys: int,
    query_offset: int | Tensor,
    key_start: Tensor | None,
    key_end: Tensor | None,
    cu_seqlens: Tensor | None,
) -> list[Segment]:
    """Returns the non-empty segments of a call; queries outside all of them see no key and have output zero."""
    if cu_seqlens is not None:
        borders = check_documents(cu_seqlens, num_queries)
        pairs = zip(borders, borders[1:], strict=False)
        return [_segment(0, left, right, left, left, right) for left, right in pairs if right > left]
    offsets = query_offset.tolist() if isinstance(query_offset, Tensor) else [query_offset] * batch
    starts = [0] * batch if key_start is None else [max(0, x) for x in key_start.tolist()]
    stops = [num_keys] * batch if key_end is None else [min(num_keys, x) for x in key_end.tolist()]
    found = [_segment(b, 0, num_queries, offsets[b], starts[b], stops[b]) for b in range(batch)]
    return [s for s in found if s.num_rows > 0 and s.num_keys > 0]
