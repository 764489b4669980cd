"""Torch path for long segments, one KV group at a time: near tiles for all rows, compacted rows for far keys.

The two passes of each function return False where scores leave the range that :mod:`aha_kernels.group`
states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aha_kernels.flash import flash_forward, flash_suits
from aha_kernels.group import Group, all_finite, with_column
from aha_kernels.problem import Problem
from aha_kernels.tiles import FarRows

SMALLEST_SHARE = 1e-30  # of the weight that near keys may have before their part of a gradient underflows


def banded_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    opens: Tensor,
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    lse_here: Tensor,
) -> bool:
    """Writes output and log-sum-exps of one segment and KV group; returns False if they leave the dtype's
    range.

    q, out [queries, group, dim]; k, v [keys, dim]; opens (bool), lse, lse_here [queries, group]. The last
    query's own key is the last key.
    """
    work = Group(q, k, v, problem, lse.dtype)
    own = work.own_scores()
    work.set_reference(own)
    sums, totals = work.near_sums()
    lse_here.copy_((totals.log() + own).view_as(lse))
    far = work.far_rows(opens.reshape(-1).nonzero()[:, 0])
    if len(far):
        far_sums, far_totals = sums[far.rows], totals[far.rows]
        work.accumulate_far(far, work.queries[far.rows], work.sinks, None, far_sums, far_totals)
        sums[far.rows], totals[far.rows] = far_sums, far_totals
    if not all_finite(sums, totals):
        return False
    lse.copy_((totals.log() + own).view_as(lse))
    out.copy_(sums.div_(totals[:, None]).view_as(q))
    return True


def banded_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    opens: Tensor,
    probes: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_here: Tensor,
    problem: Problem,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    grad_route: Tensor | None,
) -> bool:
    """Writes grad_q and grad_route, adds to grad_k and grad_v [keys, dim]; shapes and result as in
    banded_forward.

    Nothing is written when the result is False.
    """
    work = Group(q, k, v, problem, lse.dtype)
    share = (lse_here - lse).exp_().view(-1)  # of the chosen keys' weight that lies near; 1 for here-rows
    d_out = with_column(grad_out, 0.0, 1.0, lse.dtype)
    delta = (d_out[:, : work.dim] * out.reshape(-1, work.dim)).sum(-1)
    d_out[:, work.dim] = -delta
    d_route = None
    if grad_route is not None:
        d_route = torch.zeros_like(delta)
        if bool((share < SMALLEST_SHARE).any()):
            return False
        if probes is not None and flash_suits(probes, work.num_keys):
            everything, _ = flash_forward(q, k, v, problem.softmax_scale, lse.dtype)
            rows = work.far_rows(probes.reshape(-1).nonzero()[:, 0]).rows
            difference = (d_out[:, : work.dim] * everything.reshape(-1, work.dim)).sum(-1) - delta
            d_route[rows] = difference[rows]
        elif probes is not None and not probe_rows(work, probes, lse_here, d_out, d_route):
            return False

    far = work.far_rows(opens.reshape(-1).nonzero()[:, 0])
    far_queries, far_d_out = work.queries[far.rows], d_out[far.rows]
    far_queries[:, work.dim] = -lse.reshape(-1)[far.rows]
    work.set_reference(lse_here)
    gradients = Gradients(work)
    # d_out * share: the near weights below are relative to the near keys alone
    near_sum = near_backward(work, gradients, d_out.mul_(share[:, None]), d_route is not None)
    if len(far):
        rows_gradient = torch.zeros_like(far_queries[:, : work.dim])
        _far_backward(work, far, far_queries, far_d_out, gradients, rows_gradient, work.sinks, None)
        gradients.queries[far.rows] += rows_gradient
        if d_route is not None and near_sum is not None:
            d_route[far.rows] = -(near_sum / share)[far.rows]  # near_sum is share * <dO, O_here - O_all>
    grad_q.copy_(gradients.queries.mul_(problem.softmax_scale).view_as(q))
    grad_k.add_(gradients.keys)
    grad_v.add_(gradients.values)
    if grad_route is not None and d_route is not None:
        grad_route.copy_(d_route.view_as(grad_route))
    return True


class Gradients:
    """Sums of the backward pass: rows [queries * group, dim] (without the softmax scale), keys and values
    [keys, dim].
    """

    def __init__(self, work: Group) -> None:
        self.queries = torch.empty_like(work.queries[:, : work.dim])
        self.keys = torch.zeros_like(work.keys[:, : work.dim])
        self.values = torch.zeros_like(self.keys)


def probe_rows(work: Group, probes: Tensor, lse_here: Tensor, d_out: Tensor, d_route: Tensor) -> bool:
    """Writes ``<dO, O_all - O_here>`` of the here-rows in probes to d_route [rows]; returns False out of
    range.
    """
    rows = work.far_rows(probes.reshape(-1).nonzero()[:, 0])
    if len(rows) == 0:
        return True
    queries, row_d_out = work.queries[rows.rows], d_out[rows.rows]
    queries[:, work.dim] = -lse_here.reshape(-1)[rows.rows]
    sums, totals = torch.zeros_like(queries[:, : work.dim]), torch.zeros_like(queries[:, 0])
    work.accumulate_far(rows, queries, work.sinks, None, sums, totals)
    # sums is weight * O_far relative to the near weight 1; the last column of d_out is -<dO, O_here>
    difference = (sums * row_d_out[:, : work.dim]).sum(-1) + totals * row_d_out[:, work.dim]
    d_route[rows.rows] = difference / (1 + totals)
    return all_finite(sums, totals)


def near_backward(work: Group, gradients: Gradients, d_out: Tensor, sum_rows: bool) -> Tensor | None:
    """Writes gradients.queries and adds to the others over near keys and sinks; returns sums [rows] if asked.

    d_out [rows, dim + 1] is ``share * [dO, -delta]``; the sums are of the score gradients over each row's
    near keys.
    """
    dim = work.dim
    sums = torch.empty_like(d_out[:, 0]) if sum_rows else None
    for tile in work.near:
        weights = work.near_weights(tile)
        tile_d_out, tile_queries = work.tile_rows(tile, d_out), work.tile_rows(tile, work.queries)
        d_scores = work.product(tile_d_out, work.tile_keys(tile, work.values).transpose(1, 2), buffer=1)
        d_scores.mul_(weights)
        for i in range(tile.count):
            keys = slice(tile.key + i * tile.queries, tile.key + i * tile.queries + tile.width)
            gradients.values[keys].addmm_(weights[i].T, tile_d_out[i, :, :dim])
            gradients.keys[keys].addmm_(d_scores[i].T, tile_queries[i, :, :dim])
        tile_keys = work.tile_keys(tile, work.keys)[..., :dim]
        torch.bmm(d_scores, tile_keys, out=work.tile_rows(tile, gradients.queries))
        if sums is not None:
            torch.sum(d_scores, -1, out=work.tile_rows(tile, sums[:, None])[..., 0])
    sinks = work.sink_rows()
    if len(sinks):
        rows = slice(int(sinks.rows[0]), None)
        row_sums = None if sums is None else sums[rows]
        _far_backward(
            work,
            sinks,
            work.queries[rows],
            d_out[rows],
            gradients,
            gradients.queries[rows],
            0,
            work.sinks,
            row_sums,
        )
    return sums


def _far_backward(
    work: Group,
    rows: FarRows,
    queries: Tensor,
    d_out: Tensor,
    gradients: Gradients,
    rows_gradient: Tensor,
    first_key: int,
    last_key: int | None,
    row_sums: Tensor | None = None,
) -> None:
    """Adds to gradients.keys and .values, to rows_gradient [rows, dim] and to row_sums over the far keys of
    the rows.

    queries [rows, dim + 1] is ``[q * scale, -reference]``, d_out [rows, dim + 1] is ``[dO, -delta]``.
    """
    dim = work.dim
    for tile in rows.tiles(first_key, last_key):
        at, keys = slice(tile.row, tile.row_stop), slice(tile.key, tile.key_stop)
        weights = work.far_weights(rows, tile, queries)
        gradients.values[keys].addmm_(weights.T, d_out[at, :dim])
        d_scores = work.product(d_out[at], work.values[keys].T, buffer=1).mul_(weights)
        gradients.keys[keys].addmm_(d_scores.T, queries[at, :dim])
        rows_gradient[at].addmm_(d_scores, work.keys[keys, :dim])
        if row_sums is not None:
            row_sums[at] += d_scores.sum(-1)
