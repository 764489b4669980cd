"""Cuts one attention call into independent segments: a batch item, or one document of a packed row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aha_kernels.errors import InputError


@dataclass(frozen=True)
class Segment:
    """Queries ``row_start .. row_stop - 1`` of one batch item, which see keys ``key_start .. key_stop - 1``
    only.

    ``first_position`` is the position of the first query relative to ``key_start``; it is never negative,
    because queries before the first key see nothing and belong to no segment.
    """

    batch: int
    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    first_position: int

    @property
    def ends_at_last_key(self) -> bool:
        """Whether the last query sits at the last key."""
        return self.first_position + self.num_rows == self.num_keys

    @property
    def rows(self) -> slice:
        """The queries, in the batch item."""
        return slice(self.row_start, self.row_stop)

    @property
    def keys(self) -> slice:
        """The keys, in the batch item."""
        return slice(self.key_start, self.key_stop)

    @property
    def num_rows(self) -> int:
        """Number of queries."""
        return self.row_stop - self.row_start

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return self.key_stop - self.key_start


def _segments(
    batch: int, row_stop: int, position: int, key_start: int, key_stop: int, row_start: int = 0
) -> list[Segment]:
    """Segments of rows ``row_start .. row_stop - 1``; ``position`` of the first counts from key 0.

    Rows before the first key are left out; rows behind the last key make a segment of their own, so that in
    the others the last row sits at the last key.
    """
    skipped = max(0, key_start - position)
    row_start, position = row_start + skipped, position + skipped
    behind = min(row_stop, max(row_start, row_start + key_stop - position))
    found = []
    if row_start < behind:
        last = position + behind - row_start
        found.append(Segment(batch, row_start, behind, key_start, last, position - key_start))
    if behind < row_stop and key_start < key_stop:
        found.append(
            Segment(batch, behind, row_stop, key_start, key_stop, position + behind - row_start - key_start)
        )
    return found


def check_documents(cu_seqlens: Tensor, num_tokens: int) -> list[int]:
    """Returns the document borders as a list, or raises InputError when they do not run from 0 to
    num_tokens.
    """
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
    """Returns the non-empty segments of a call; queries outside all of them see no key and have output
    zero.
    """
    if cu_seqlens is not None:
        borders = check_documents(cu_seqlens, num_queries)
        pairs = zip(borders, borders[1:], strict=False)
        return [s for left, right in pairs for s in _segments(0, right, left, left, right, row_start=left)]
    offsets = query_offset.tolist() if isinstance(query_offset, Tensor) else [query_offset] * batch
    starts = [0] * batch if key_start is None else [max(0, x) for x in key_start.tolist()]
    stops = [num_keys] * batch if key_end is None else [min(num_keys, x) for x in key_end.tolist()]
    return [s for b in range(batch) for s in _segments(b, num_queries, offsets[b], starts[b], stops[b])]
