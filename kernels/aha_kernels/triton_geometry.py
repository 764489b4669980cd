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

    def has_far(self) -> Tensor:
        """Returns bool [batch, queries]: whether a query has a key that *here* does not see."""
        position = self.offset[:, None] + torch.arange(self.first.shape[1], device=self.first.device)
        return torch.minimum(position - self.window + 1, self.stop) > self.first + self.sinks


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
    return Geometry(
        first.contiguous(), stop.to(torch.int32).contiguous(), offset, problem.window, problem.num_sink_tokens
    )


@dataclass(frozen=True)
class RowList:
    """Codes of the chosen rows, sorted, int32 [batch * kv_heads, queries * group]; the first counts[i] of
    list i hold.
    """

    codes: Tensor
    counts: Tensor


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
    codes = codes[:, :size].contiguous()
    return RowList(codes, counts)


def list_bounds(
    rows: RowList, geometry: Geometry, kv_heads: int, group: int, block: int, num_keys: int
) -> Tensor:
    """Returns int32 [batch * kv_heads, key_blocks, 2]: the part of each list that can see each block of
    keys.
    """
    batch, queries = geometry.first.shape
    device = rows.codes.device
    begin = torch.arange(0, num_keys, block, dtype=torch.int32, device=device)
    query = (rows.codes // group).clamp_max(queries - 1).long().view(batch, -1)
    held = torch.arange(rows.codes.shape[1], device=device) < rows.counts[:, None]
    position = (query + geometry.offset[:, None]).to(torch.int32).view_as(rows.codes)
    position = torch.where(held, position, 2**31 - 1)
    first = torch.where(held, geometry.first.gather(1, query).view_as(rows.codes), 2**31 - 1)
    blocks = begin.expand(rows.codes.shape[0], -1).contiguous()
    starts = torch.searchsorted(position.contiguous(), blocks)
    ends = torch.searchsorted(first.contiguous(), blocks + (block - 1), right=True)
    return torch.stack([starts, ends], -1).to(torch.int32).contiguous()


def sink_bounds(geometry: Geometry, block: int, num_keys: int) -> Tensor:
    """Returns int32 [batch, key_blocks]: one past the last query for which a block of keys may hold sinks,
    or 0.
    """
    begin = torch.arange(0, num_keys, block, dtype=torch.int32, device=geometry.first.device)
    blocks = begin.expand(geometry.first.shape[0], -1).contiguous()
    stops = torch.searchsorted(geometry.first, blocks + (block - 1), right=True)
    last = geometry.first.gather(1, (stops - 1).clamp_min(0))
    return torch.where((stops > 0) & (last + geometry.sinks > blocks), stops, 0).to(torch.int32).contiguous()
