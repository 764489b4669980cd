"""Torch path for long segments, one KV group at a time: near tiles for all rows, compacted rows for far keys.

The two passes of each function return False where scores leave the range that :mod:`aha_kernels.group`
states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aha_kernels.call import Activations, Gradients
from aha_kernels.flash import flash_forward, flash_suits
from aha_kernels.group import LOG2E, Group, all_finite, with_column
from aha_kernels.problem import Problem
from aha_kernels.tiles import FarRows

SMALLEST_SHARE = 1e-30  # of the weight that near keys may have before their part of a gradient underflows


def banded_forward(part: Activations, problem: Problem) -> bool:
    """Writes output and log-sum-exps of one segment and KV group; returns False if they leave the dtype's range.

    The last query's own key is the last key.
    """
    work = Group(part.q, part.k, part.v, problem, part.lse.dtype)
    own = work.own_scores()
    work.set_reference(own)
    sums, totals = work.near_sums()
    part.lse_here.copy_((totals.log() + own).view_as(part.lse))
    far = work.far_rows(part.opens.reshape(-1).nonzero()[:, 0])
    if len(far):
        far_sums, far_totals = sums[far.rows], totals[far.rows]
        work.accumulate_far(far, work.queries[far.rows], work.sinks, None, far_sums, far_totals)
        sums[far.rows], totals[far.rows] = far_sums, far_totals
    if not all_finite(sums, totals):
        return False
    part.lse.copy_((totals.log() + own).view_as(part.lse))
    part.out.copy_(sums.div_(totals[:, None]).view_as(part.q))
    return True


def banded_backward(part: Activations, grads: Gradients, problem: Problem) -> bool:
    """Writes the gradients of one segment and KV group; nothing, and returns False, as in banded_forward."""
    work = Group(part.q, part.k, part.v, problem, part.lse.dtype)
    # Of the chosen keys' weight, what lies near; 1 for here-rows.
    share = (part.lse_here - part.lse).exp_().view(-1)
    d_out = with_column(grads.out, 0.0, 1.0, part.lse.dtype)
    delta = (d_out[:, : work.dim] * part.out.reshape(-1, work.dim)).sum(-1)
    d_out[:, work.dim] = -delta
    d_route = None
    if grads.route is not None:
        d_route = torch.zeros_like(delta)
        if bool((share < SMALLEST_SHARE).any()):
            return False
        if grads.probes is not None and not _probe(work, part, grads.probes, d_out, delta, d_route):
            return False

    far = work.far_rows(part.opens.reshape(-1).nonzero()[:, 0])
    far_queries, far_d_out = work.queries[far.rows], d_out[far.rows]
    work.refer(far_queries, part.lse.reshape(-1)[far.rows])
    work.set_reference(part.lse_here)
    sums = GradientSums(work)
    # d_out * share: the near weights below are relative to the near keys alone
    near_sum = near_backward(work, sums, d_out.mul_(share[:, None]), d_route is not None)
    if len(far):
        rows_gradient = torch.zeros_like(far_queries[:, : work.dim])
        _far_backward(work, far, far_queries, far_d_out, sums, rows_gradient, work.sinks, None)
        sums.queries[far.rows] += rows_gradient
        if d_route is not None and near_sum is not None:
            d_route[far.rows] = -(near_sum / share)[far.rows]  # near_sum is share * <dO, O_here - O_all>
    grads.q.copy_(sums.queries.mul_(problem.softmax_scale).view_as(part.q))
    grads.k.add_(sums.keys, alpha=1 / LOG2E)
    grads.v.add_(sums.values)
    if grads.route is not None and d_route is not None:
        grads.route.copy_(d_route.view_as(grads.route))
    return True


def _probe(
    work: Group, part: Activations, probes: Tensor, d_out: Tensor, delta: Tensor, d_route: Tensor
) -> bool:
    """Writes ``<dO, O_all - O_here>`` of the here-rows in probes to d_route [rows]; returns False out of range."""
    if not flash_suits(probes, work.num_keys):
        return probe_rows(work, probes, part.lse_here, d_out, d_route)
    scale, dtype = work.softmax_scale, part.lse.dtype
    everything, _ = flash_forward(part.q, part.k, part.v, scale, dtype)
    rows = work.far_rows(probes.reshape(-1).nonzero()[:, 0]).rows
    difference = (d_out[:, : work.dim] * everything.reshape(-1, work.dim)).sum(-1) - delta
    d_route[rows] = difference[rows]
    return True


class GradientSums:
    """Sums of the backward pass: rows [queries * group, dim] (without the softmax scale), keys (times log2 e, as
    the rows of a ``Group`` are) and values [keys, dim].
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
    work.refer(queries, lse_here.reshape(-1)[rows.rows])
    sums, totals = torch.zeros_like(queries[:, : work.dim]), torch.zeros_like(queries[:, 0])
    work.accumulate_far(rows, queries, work.sinks, None, sums, totals)
    # sums is weight * O_far relative to the near weight 1; the last column of d_out is -<dO, O_here>
    difference = (sums * row_d_out[:, : work.dim]).sum(-1) + totals * row_d_out[:, work.dim]
    d_route[rows.rows] = difference / (1 + totals)
    return all_finite(sums, totals)


def near_backward(work: Group, gradients: GradientSums, d_out: Tensor, sum_rows: bool) -> Tensor | None:
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
    gradients: GradientSums,
    rows_gradient: Tensor,
    first_key: int,
    last_key: int | None,
    row_sums: Tensor | None = None,
) -> None:
    """Adds to gradients.keys and .values, to rows_gradient [rows, dim] and to row_sums over the far keys of
    the rows.

    queries [rows, dim + 1] is ``[q * scale, -reference] * log2 e``, d_out [rows, dim + 1] is ``[dO, -delta]``.
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
