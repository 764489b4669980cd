"""Launches the Triton kernels: forward and backward of one attention call."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from aha_kernels.problem import Problem
from aha_kernels.triton_backward import key_value_kernel, near_query_kernel, rows_query_kernel
from aha_kernels.triton_forward import near_forward_kernel, rows_forward_kernel
from aha_kernels.triton_geometry import (
    RowList,
    key_work,
    list_rows,
    list_spans,
    make_geometry,
    make_row_list,
    near_rows,
    row_block_count,
    span_tiles,
    work_list,
)
from aha_kernels.triton_tiles import Tile, architecture, kernel_tile

LOG2_E = 1.4426950408889634


def dense_last(x: Tensor) -> Tensor:
    """Returns x, copied only if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Launch:
    """Arguments that all kernels of a call share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> None:
        self.q, self.k, self.v = dense_last(q), dense_last(k), dense_last(v)
        self.batch, self.queries, self.heads, self.dim = q.shape
        self.keys, self.kv_heads = k.shape[1], k.shape[2]
        self.group, self.lists = self.heads // self.kv_heads, self.batch * self.kv_heads
        self.problem = problem
        self.geometry = make_geometry(problem, self.batch, self.queries, self.keys, q.device)
        self.window = self.geometry.window
        self.scale = problem.softmax_scale
        self.sizes = (self.queries, self.keys, self.kv_heads)
        self.strides = (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3])

    def tile(self, kernel: str) -> Tile:
        """Returns the tile of a kernel of this call."""
        return kernel_tile(kernel, self.dim, self.q.dtype, architecture(self.q.device))

    def constants(self, tile: Tile) -> dict[str, Any]:
        """Returns the compile-time arguments for a tile."""
        return {
            "GROUP": self.group,
            "D": self.dim,
            "BLOCK_D": triton.next_power_of_2(self.dim),
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def row_blocks(self, tile: Tile) -> int:
        """Returns the blocks of rows that the longest list possible has."""
        return row_block_count(self.queries, self.group, tile.rows)

    def row_work(self, rows: RowList, tile: Tile, far: bool = False) -> Tensor:
        """Returns the work list of a pass over listed rows: blocks of the lists, those with most keys first."""
        return work_list(span_tiles(list_spans(rows, self.geometry, tile.rows, far), tile.keys))

    def listed(self, route: Tensor) -> Tensor:
        """Returns bool [batch, queries, heads]: the all-rows that have a far key; to the others *all* is
        *here*.
        """
        return (route != 0) & self.geometry.has_far()[..., None]

    def rows_forward(
        self,
        rows: RowList,
        out: Tensor,
        lse: Tensor,
        probe: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
        weight: float = 1.0,
    ) -> None:
        """Runs the pass over listed rows; probe is (d_out, delta, lse_here, d_route) for router gradients."""
        tile = self.tile("rows" if probe is None else "probe")
        d_out, delta, lse_here, d_route = (lse, lse, lse, lse) if probe is None else probe
        work = self.row_work(rows, tile, far=probe is not None)
        rows_forward_kernel[(len(work),)](
            self.q, self.k, self.v, out, lse, d_out, delta, lse_here, d_route, work, rows.codes, rows.counts,
            self.geometry.first, self.geometry.stop, self.geometry.offset, *self.sizes, self.row_blocks(tile),
            self.window, self.problem.num_sink_tokens, self.scale * LOG2_E, weight, *self.strides,
            PROBE=probe is not None, **self.constants(tile),
        )  # fmt: skip


def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, route: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output and the log-sum-exps of chosen and near keys, as the operator in aha_kernels.ops."""
    call = Launch(q, k, v, problem)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    lse_here = torch.empty_like(lse)
    if out.numel() == 0:
        return out, lse, lse_here
    geometry = call.geometry
    tile = call.tile("near")
    near_forward_kernel[(call.row_blocks(tile) * call.lists,)](
        call.q, call.k, call.v, out, lse, lse_here, geometry.first, geometry.stop, geometry.offset,
        *call.sizes, call.lists, call.window, call.scale * LOG2_E, *call.strides,
        SINKS=problem.num_sink_tokens, **call.constants(tile),
    )  # fmt: skip
    call.rows_forward(make_row_list(call.listed(route), call.kv_heads), out, lse)
    return out, lse, lse_here


def triton_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    route: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_here: Tensor,
    probes: Tensor | None,
    problem: Problem,
    router_grad_rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and route, as the operator in aha_kernels.ops."""
    call = Launch(q, k, v, problem)
    geometry, scale, sinks = call.geometry, call.scale * LOG2_E, problem.num_sink_tokens
    grad_out = grad_out.contiguous()
    delta = (grad_out.float() * out.float()).sum(-1)
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    with_router = router_grad_rate > 0.0
    grad_route = torch.zeros_like(lse) if with_router else lse.new_empty(0)
    if out.numel() == 0 or k.numel() == 0:
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_(), grad_route
    listed = call.listed(route)
    rows = make_row_list(listed, call.kv_heads)
    ranges = (geometry.first, geometry.stop)

    tile = call.tile("query")
    near_query_kernel[(call.row_blocks(tile) * call.lists,)](
        call.q, call.k, call.v, grad_out, lse_here, delta, listed.view(torch.uint8), grad_q, grad_route,
        *ranges, geometry.offset, *call.sizes, call.lists, call.window, scale, call.scale, *call.strides,
        ROUTER_GRAD=with_router, SINKS=sinks, **call.constants(tile),
    )  # fmt: skip
    work = call.row_work(rows, tile)
    rows_query_kernel[(len(work),)](
        call.q, call.k, call.v, grad_out, lse, delta, grad_q, work, rows.codes, rows.counts, *ranges,
        *call.sizes, call.row_blocks(tile), scale, call.scale, *call.strides, **call.constants(tile),
    )  # fmt: skip

    tile = call.tile("key_value")
    near = near_rows(geometry, tile.keys, call.keys)
    listed_part = list_rows(rows, geometry, tile.keys, call.keys)
    work = work_list(key_work(near, listed_part, call.group, tile.rows))
    key_value_kernel[(len(work),)](
        call.q, call.k, call.v, grad_out, lse, delta, listed.view(torch.uint8), grad_k, grad_v, work,
        rows.codes, near, listed_part, *ranges, geometry.offset, *call.sizes, near.shape[1], call.window,
        scale, call.scale, *call.strides, SINKS=sinks, **call.constants(tile),
    )  # fmt: skip

    if with_router:
        probed = (route == 0) if probes is None else probes
        probed_rows = make_row_list(probed & geometry.has_far()[..., None], call.kv_heads)
        call.rows_forward(
            probed_rows, out, lse, (grad_out, delta, lse_here, grad_route), 1.0 / router_grad_rate
        )
    return grad_q, grad_k, grad_v, grad_route
