"""How much of what the Triton kernels compute the routes asked for: scores in tiles over scores opened.

Tiles compute keys beyond windows and above the diagonal, and rows that fill up a block. The counts follow
from the same work lists that the kernels read; tests compare them with the tiles that the kernels compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aha_kernels.problem import Problem
from aha_kernels.triton_geometry import (
    Geometry,
    list_rows,
    list_spans,
    make_geometry,
    make_row_list,
    near_rows,
    row_block_count,
    span_tiles,
)
from aha_kernels.triton_tiles import Tile, kernel_tile


@dataclass(frozen=True)
class TileCount:
    """Tiles of one pass: over windows and sinks of all rows, and over listed rows; scores in these tiles,
    and scores that the routes open.
    """

    near: int
    listed: int
    computed: int
    needed: int

    @property
    def ratio(self) -> float:
        """Returns scores computed over scores needed; infinite if none are needed."""
        return self.computed / self.needed if self.needed else float("inf")


def count_tiles(
    route: Tensor,
    num_keys: int,
    kv_heads: int,
    head_dim: int,
    problem: Problem,
    dtype: torch.dtype = torch.bfloat16,
    architecture: str = "sm_90",
) -> dict[str, TileCount]:
    """Returns the tiles of the passes "forward", "query" and "key_value" (backward without the router's
    probes) for a route [batch, queries, heads]; other arguments as in aha_kernels.aha_attention.
    """
    batch, queries, heads = route.shape
    group = heads // kv_heads
    geometry = make_geometry(problem, batch, queries, num_keys, route.device)
    needed = needed_scores(route, geometry)
    rows = make_row_list((route != 0) & geometry.has_far()[..., None], kv_heads)
    counts = {}
    for name, near_name, rows_name in (("forward", "near", "rows"), ("query", "query", "query")):
        near_tile, rows_tile = (
            kernel_tile(kernel, head_dim, dtype, architecture) for kernel in (near_name, rows_name)
        )
        near = near_tiles(geometry, num_keys, group, near_tile) * kv_heads
        listed = int(span_tiles(list_spans(rows, geometry, rows_tile.rows, far=False), rows_tile.keys).sum())
        computed = near * near_tile.rows * near_tile.keys + listed * rows_tile.rows * rows_tile.keys
        counts[name] = TileCount(near, listed, computed, needed)
    tile = kernel_tile("key_value", head_dim, dtype, architecture)
    near_part = _blocks(near_rows(geometry, tile.keys, num_keys) * group, tile.rows) * kv_heads
    listed_part = _blocks(list_rows(rows, geometry, tile.keys, num_keys), tile.rows)
    computed = (near_part + listed_part) * tile.rows * tile.keys
    counts["key_value"] = TileCount(near_part, listed_part, computed, needed)
    return counts


def needed_scores(route: Tensor, geometry: Geometry) -> int:
    """Returns the pairs of a row and a key that it sees under its route."""
    everything = (geometry.stop - geometry.first).clamp_min(0)
    near = torch.maximum(geometry.first, geometry.position() - geometry.window + 1)
    sinks = (
        torch.minimum(torch.minimum(geometry.first + geometry.sinks, near), geometry.stop) - geometry.first
    )
    here = (geometry.stop - near).clamp_min(0) + sinks.clamp_min(0)
    return int(torch.where(route != 0, everything[..., None], here[..., None]).sum())


def near_tiles(geometry: Geometry, num_keys: int, group: int, tile: Tile) -> int:
    """Returns the tiles of the window pass for one KV head of every item."""
    batch, queries = geometry.first.shape
    blocks = row_block_count(queries, group, tile.rows)
    query = torch.arange(blocks * tile.rows, device=geometry.first.device).view(blocks, -1) // group
    held = (query < queries).expand(batch, -1, -1)
    first, stop, position = (
        x[:, query.clamp_max(queries - 1)] for x in (geometry.first, geometry.stop, geometry.position())
    )
    first, stop = torch.where(held, first, num_keys), torch.where(held, stop, 0)
    near = torch.maximum(first, position - geometry.window + 1)
    begin = torch.where(stop > near, near, num_keys).amin(-1) // tile.keys * tile.keys
    sink_begin = first.amin(-1)
    sinks = torch.stack([sink_begin, torch.minimum(sink_begin + geometry.sinks, begin)], -1)
    tiles = span_tiles(torch.stack([begin, stop.amax(-1)], -1), tile.keys)
    return int(tiles.sum()) + _blocks(sinks, tile.keys)


def _blocks(spans: Tensor, block: int) -> int:
    """Returns how many blocks, each starting where a span or the block before ends, cover the spans [..., 2]."""
    return int(
        ((spans[..., 1] - spans[..., 0]).clamp_min(0) + block - 1).div(block, rounding_mode="floor").sum()
    )
