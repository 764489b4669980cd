"""What the Triton kernels read besides values: per-row key ranges and compacted row lists, all made on the
device.

Rows of a KV group are interleaved, ``code = query * group + head``: its heads share each load of keys and
values. Nothing here waits for the device: sizes are the largest possible, counts stay in device memory,
surplus programs leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aha_kernels.problem import Problem


@dataclass(frozen=True)
class Geometry:
    """Which keys each query sees: ``first <= key < stop``; int32 [batch, queries], and int32 offset
    [batch].
    """

    first: Tensor
    stop: Tensor
    offset: Tensor
    window: int
    sinks: int

    def position(self) -> Tensor:
        """Returns int32 [batch, queries]: where each query sits among the keys."""
        rows = torch.arange(self.first.shape[1], dtype=torch.int32, device=self.first.device)
        return self.offset[:, None] + rows

    def has_far(self) -> Tensor:
        """Returns bool [batch, queries]: whether a query has a key that *here* does not see."""
        return torch.minimum(self.position() - self.window + 1, self.stop) > self.first + self.sinks


def make_geometry(
    problem: Problem, batch: int, num_queries: int, num_keys: int, device: torch.device
) -> Geometry:
    """Returns the key ranges of a call."""
    rows = torch.arange(num_queries, dtype=torch.int32, device=device).expand(batch, num_queries)
    offset = (
        torch.as_tensor(problem.query_offset, dtype=torch.int32, device=device).expand(batch).contiguous()
    )
    position = rows + offset[:, None]
    stop = torch.clamp(position + 1, max=num_keys)
    if problem.key_end is not None:
        stop = torch.minimum(stop, problem.key_end.to(device, torch.int32)[:, None])
    first = torch.zeros_like(position)
    if problem.key_start is not None:
        first = first + problem.key_start.to(device, torch.int32).clamp_min(0)[:, None]
    if problem.cu_seqlens is not None:
        borders = problem.cu_seqlens.to(device=device, dtype=torch.int32)
        first = borders[torch.searchsorted(borders, rows[0].contiguous(), right=True) - 1][None]
    window = min(problem.window, 2**30)  # sums with it stay in int32
    return Geometry(
        first.contiguous(), stop.to(torch.int32).contiguous(), offset, window, problem.num_sink_tokens
    )


@dataclass(frozen=True)
class RowList:
    """Codes of the chosen rows, sorted, int32 [batch * kv_heads, queries * group]; the first counts[i] of
    list i hold.
    """

    codes: Tensor
    counts: Tensor
    group: int

    def ranges(self, geometry: Geometry, number: Tensor, surplus: int) -> tuple[Tensor, Tensor]:
        """Returns (first, stop) of the rows at places ``number`` [lists, n] of each list, ``surplus`` past
        its end.
        """
        held = number < self.counts[:, None]
        query = self.codes.gather(1, number.clamp_max(self.codes.shape[1] - 1).long()) // self.group
        query = query.clamp_max(geometry.first.shape[1] - 1).long()
        kv_heads = self.codes.shape[0] // geometry.first.shape[0]
        found = (x.repeat_interleave(kv_heads, 0).gather(1, query) for x in (geometry.first, geometry.stop))
        first, stop = (torch.where(held, x, surplus) for x in found)
        return first, stop


def make_row_list(chosen: Tensor, kv_heads: int) -> RowList:
    """Returns the list of the rows where chosen, bool [batch, queries, heads], is set: an ordered
    compaction.
    """
    batch, queries, heads = chosen.shape
    group = heads // kv_heads
    flags = (
        chosen.view(batch, queries, kv_heads, group)
        .transpose(1, 2)
        .reshape(batch * kv_heads, queries * group)
    )
    place = flags.cumsum(1, dtype=torch.int32)
    counts = place[:, -1].contiguous()
    size = flags.shape[1]
    codes = torch.full((batch * kv_heads, size + 1), size, dtype=torch.int32, device=chosen.device)
    source = torch.arange(size, dtype=torch.int32, device=chosen.device).expand_as(flags)
    codes.scatter_(1, torch.where(flags, place - 1, size).long(), source)  # others fall into the last column
    return RowList(codes[:, :size].contiguous(), counts, group)


def row_block_count(queries: int, group: int, block: int) -> int:
    """Returns the blocks of rows that the longest list possible has."""
    return -(-queries * group // block)


def _key_blocks(num_keys: int, block: int, lists: int, device: torch.device) -> Tensor:
    """Returns int32 [lists, key_blocks]: the first key of each block."""
    return torch.arange(0, num_keys, block, dtype=torch.int32, device=device).expand(lists, -1).contiguous()


def list_rows(rows: RowList, geometry: Geometry, block: int, num_keys: int) -> Tensor:
    """Returns int32 [batch * kv_heads, key_blocks, 2]: the part of each list that can see each block of
    keys.
    """
    lists, size = rows.codes.shape
    number = torch.arange(size, dtype=torch.int32, device=rows.codes.device).expand(lists, -1)
    first, stop = rows.ranges(geometry, number, 2**31 - 1)
    begin = _key_blocks(num_keys, block, lists, rows.codes.device)
    starts = torch.searchsorted(stop, begin, right=True)
    ends = torch.searchsorted(first, begin + (block - 1), right=True)
    return torch.stack([torch.minimum(starts, rows.counts[:, None]), ends], -1).to(torch.int32).contiguous()


def near_rows(geometry: Geometry, block: int, num_keys: int) -> Tensor:
    """Returns int32 [batch, key_blocks, 2]: the queries whose window or sinks can meet each block of keys."""
    begin = _key_blocks(num_keys, block, geometry.first.shape[0], geometry.first.device)
    starts = torch.searchsorted(geometry.stop, begin, right=True)
    stops = torch.searchsorted(geometry.first, begin + (block - 1), right=True)
    last = (begin + (block - 1 + geometry.window) - geometry.offset[:, None]).clamp_min(0)
    if geometry.sinks:
        first = geometry.first.gather(
            1, (stops - 1).clamp_min(0)
        )  # of the last document that starts so early
        last = torch.where(first + geometry.sinks > begin, 2**31 - 1, last)
    ends = torch.minimum(stops, last).maximum(starts)
    return torch.stack([starts, ends], -1).to(torch.int32).contiguous()


def list_spans(rows: RowList, geometry: Geometry, block: int, far: bool) -> Tensor:
    """Returns int32 [batch * kv_heads, blocks, 2]: the keys from, to of each block of rows of each list,
    without the near ones if far; empty past the list's end.
    """
    lists, size = rows.codes.shape
    begin = torch.arange(0, size, block, dtype=torch.int32, device=rows.codes.device).expand(lists, -1)
    last = torch.minimum(begin + block, rows.counts[:, None]) - 1
    first, _ = rows.ranges(geometry, begin, 0)
    _, stop = rows.ranges(geometry, last.clamp_min(0), 0)
    if far:
        query = rows.codes.gather(1, last.clamp_min(0).long()) // rows.group
        offset = geometry.offset.repeat_interleave(lists // geometry.offset.shape[0])
        first, stop = (
            first + geometry.sinks,
            torch.minimum(stop, query + offset[:, None] - geometry.window + 1),
        )
    held = begin < rows.counts[:, None]
    return torch.stack([torch.where(held, first, 0), torch.where(held, stop, 0)], -1).to(torch.int32)


def span_tiles(spans: Tensor, block: int) -> Tensor:
    """Returns int32 [...]: the tiles of ``block`` keys, aligned to its multiples, that spans [..., 2] touch."""
    begin, end = spans.unbind(-1)
    return (end - begin // block * block + block - 1).clamp_min(0) // block


def work_list(sizes: Tensor) -> Tensor:
    """Returns int32 [sizes.numel()]: the flat indices of sizes, largest first; -1 for those of size 0.

    Programs take entries in order, so the launch ends on small ones, whichever lists the large ones are in.
    """
    ordered, order = sizes.reshape(-1).sort(descending=True, stable=True)
    return torch.where(ordered > 0, order, -1).to(torch.int32)


def key_work(near: Tensor, listed: Tensor, group: int, block: int) -> Tensor:
    """Returns int32 [batch * kv_heads, key_blocks]: the size of the work on each block of keys, in blocks of
    rows, and one more for its own loads and stores: keys that no row sees get their zeros too.
    """
    near_blocks = ((near[..., 1] - near[..., 0]) * group + block - 1) // block
    list_blocks = ((listed[..., 1] - listed[..., 0]).clamp_min(0) + block - 1) // block
    return 1 + list_blocks + near_blocks.repeat_interleave(listed.shape[0] // near.shape[0], 0)


@dataclass(frozen=True)
class DecodeWork:
    """Splits of the keys of each (item, KV head), int32 running counts [batch * kv_heads]: of the full
    splits, which start first, and of the shorter rests.
    """

    full: Tensor
    rest: Tensor


def decode_work(
    opens: Tensor, lengths: Tensor, starts: Tensor, kv_heads: int, window: int, split: int
) -> DecodeWork:
    """Returns the splits of ``split`` keys that decoding needs: a KV group with an open head reads all its
    keys, a closed one its window; opens bool [batch, new_tokens, heads], lengths and starts int32 [batch].
    """
    batch, new_tokens, _ = opens.shape
    some_open = opens.view(batch, new_tokens, kv_heads, -1).any(-1).any(1)  # [batch, kv_heads]
    first_near = torch.maximum(starts, lengths - new_tokens - window + 1)
    begin = torch.where(some_open, starts[:, None], first_near[:, None])
    keys = (lengths[:, None] - begin).clamp_min(0).reshape(-1)
    full = keys // split
    rest = (keys % split > 0) | (full == 0)  # an item without keys has an entry too: it writes zeros
    return DecodeWork(full.cumsum(0, dtype=torch.int32), rest.cumsum(0, dtype=torch.int32))
