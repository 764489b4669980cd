"""Torch path for KV groups in which most rows see all keys: PyTorch's causal kernel for those, and a near
pass.
"""

from __future__ import annotations

import torch

from aha_kernels.banded import changes
from aha_kernels.call import Activations, Gradients
from aha_kernels.far_pass import GradientSums, probe_rows
from aha_kernels.flash import flash_backward, flash_forward
from aha_kernels.group import Group, all_finite
from aha_kernels.near_pass import near_backward, near_forward
from aha_kernels.problem import Problem


def mostly_open_forward(part: Activations, problem: Problem) -> bool:
    """Writes output and log-sum-exp of the chosen keys; argument and result as banded_forward.

    The log-sum-exp of the near keys is left alone: :func:`mostly_open_backward` does not read it.
    """
    dtype, opens = part.lse.dtype, part.opens
    everything, lse_all = flash_forward(part.q, part.k, part.v, problem.softmax_scale, dtype)
    if bool(opens.all()):
        part.out.copy_(everything)
        part.lse.copy_(lse_all)
        return True
    work = Group(part.q, part.k, part.v, problem, dtype)
    here, lse_here = work.rows(part.out), work.column(part.lse)
    near_forward(work, here, lse_here)
    if not all_finite(here, lse_here):
        return False
    part.out.copy_(torch.where(opens[..., None], everything, here.view_as(part.out)))
    part.lse.copy_(torch.where(opens, lse_all, lse_here.view_as(part.lse)))
    return True


def mostly_open_backward(part: Activations, grads: Gradients, problem: Problem) -> bool:
    """Writes the gradients of one segment and KV group; arguments and result as banded_backward."""
    opens = part.opens
    all_open = bool(opens.all())
    work = Group(part.q, part.k, part.v, problem, part.lse.dtype)
    d_out, out, lse = work.rows(grads.out), work.rows(part.out), work.column(part.lse)
    if grads.route is not None:
        d_route = torch.zeros_like(lse)
        probes = None if all_open else grads.probes
        if probes is not None and not probe_rows(work, probes, d_out, out, lse, d_route):
            return False
        here, lse_here = torch.empty_like(d_out), torch.empty_like(lse)
        near_forward(work, here, lse_here)
        if not all_finite(here, lse_here):
            return False
        rows = work.far_rows(opens).rows
        d_route[rows] = changes(work, d_out, here, out)[rows]
        grads.route.copy_(d_route.view_as(grads.route))
    d_q, d_k, d_v = flash_backward(
        grads.out, part.q, part.k, part.v, opens, part.out, part.lse, problem.softmax_scale
    )
    grads.q.copy_(d_q)
    grads.k.add_(d_k)
    grads.v.add_(d_v)
    if not all_open:
        lse = lse.masked_fill(opens.reshape(-1, 1), float("inf"))
        sums = GradientSums(d_out, out, lse, torch.empty_like(d_out), grads.k, grads.v, near=None)
        near_backward(work, sums)
        grads.q.add_(sums.queries.view_as(grads.q))
    return True
