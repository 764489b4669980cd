"""Torch path for long segments, one KV group at a time: near tiles for all rows, compacted rows for far keys.

Both functions return False where scores leave the range that :mod:`aha_kernels.group` states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aha_kernels.call import Activations, Gradients
from aha_kernels.far_pass import GradientSums, add_far, far_backward, probe_rows, row_products
from aha_kernels.flash import flash_forward, flash_suits
from aha_kernels.group import Group, all_finite
from aha_kernels.near_pass import near_backward, near_forward
from aha_kernels.problem import Problem

SMALLEST_SHARE = 1e-30  # of the weight that near keys may have before their part of a gradient underflows


def banded_forward(part: Activations, problem: Problem) -> bool:
    """Writes output and log-sum-exps of one segment and KV group; returns False if they leave the dtype's range.

    The last query's own key is the last key.
    """
    work = Group(part.q, part.k, part.v, problem, part.lse.dtype)
    out, lse = work.rows(part.out), work.column(part.lse)
    near_forward(work, out, lse)
    if part.lse_here is not None:
        part.lse_here.copy_(lse.view_as(part.lse))
    add_far(work, work.far_rows(part.opens), work.sinks, None, out, lse)
    if not all_finite(out, lse):
        return False
    work.deliver(out, part.out)
    work.deliver(lse, part.lse)
    return True


def banded_backward(part: Activations, grads: Gradients, problem: Problem) -> bool:
    """Writes the gradients of one segment and KV group; nothing, and returns False, as in banded_forward."""
    work = Group(part.q, part.k, part.v, problem, part.lse.dtype)
    d_out, out, lse = work.rows(grads.out), work.rows(part.out), work.column(part.lse)
    share = near = d_route = None
    if grads.route is not None and part.lse_here is not None:
        # Of the chosen keys' weight, what lies near; 1 for here-rows.
        share = work.column(part.lse_here - part.lse).exp_()
        if bool((share < SMALLEST_SHARE).any()):
            return False
        near, d_route = torch.empty_like(share), torch.zeros_like(share)
        if grads.probes is not None and not _probe(work, part, grads.probes, d_out, out, lse, d_route):
            return False

    sums = GradientSums(d_out, out, lse, work.rows(grads.q), grads.k, grads.v, near)
    near_backward(work, sums)
    far = work.far_rows(part.opens)
    far_backward(work, far, work.sinks, None, sums)
    work.deliver(sums.queries, grads.q)
    if grads.route is not None and d_route is not None and near is not None and share is not None:
        d_route[far.rows] = -(near / share)[far.rows]  # near is share * <dO, O_here - O_all>
        grads.route.copy_(d_route.view_as(grads.route))
    return True


def _probe(
    work: Group, part: Activations, probes: Tensor, d_out: Tensor, out: Tensor, lse: Tensor, d_route: Tensor
) -> bool:
    """Writes ``<dO, O_all - O_here>`` of the here-rows in probes to d_route [rows, 1]; returns False out of
    range.
    """
    if not flash_suits(probes, work.num_keys):
        return probe_rows(work, probes, d_out, out, lse, d_route)
    everything, _ = flash_forward(part.q, part.k, part.v, work.softmax_scale, work.dtype)
    rows = work.far_rows(probes).rows
    d_route[rows] = changes(work, d_out, out, work.rows(everything))[rows]
    return True


def changes(work: Group, d_out: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Returns ``<d_out, new - old>`` of each row [rows, dim]: [rows, 1]."""
    result = old.new_empty(len(old), 1)
    for band in work.bands:
        for d_o, x, y, to in band.batches(*(band.rows(x, work.group) for x in (d_out, old, new, result))):
            to.copy_(row_products(work, d_o, torch.sub(y, x, out=work.scratch(1, *x.shape))))
    return result
