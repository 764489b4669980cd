"""Torch path for KV groups in which most rows see all keys: PyTorch's causal kernel for those, and a near
pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aha_kernels.banded import GradientSums, near_backward, probe_rows
from aha_kernels.call import Activations, Gradients
from aha_kernels.flash import flash_backward, flash_forward
from aha_kernels.group import LOG2E, Group, all_finite, with_column
from aha_kernels.problem import Problem


def mostly_open_forward(part: Activations, problem: Problem) -> bool:
    """Writes output and log-sum-exp of the chosen keys; argument and result as banded_forward.

    The log-sum-exp of the near keys is left alone: :func:`mostly_open_backward` does not read it.
    """
    dtype = part.lse.dtype
    everything, lse_all = flash_forward(part.q, part.k, part.v, problem.softmax_scale, dtype)
    if bool(part.opens.all()):
        part.out.copy_(everything)
        part.lse.copy_(lse_all)
        return True
    work = Group(part.q, part.k, part.v, problem, dtype)
    here, lse_here = _near_attention(work)
    if not all_finite(here):
        return False
    part.out.copy_(torch.where(part.opens[..., None], everything, here.view_as(part.q)))
    part.lse.copy_(torch.where(part.opens, lse_all, lse_here.view_as(part.lse)))
    return True


def _near_attention(work: Group) -> tuple[Tensor, Tensor]:
    """Returns *here* attention of every row [rows, dim] and its log-sum-exp [rows]."""
    own = work.own_scores()
    work.set_reference(own)
    sums, totals = work.near_sums()
    return sums.div_(totals[:, None]), totals.log() + own


def mostly_open_backward(part: Activations, grads: Gradients, problem: Problem) -> bool:
    """Writes the gradients of one segment and KV group; arguments and result as banded_backward."""
    all_open = bool(part.opens.all())
    if not all_open or grads.route is not None:
        work = Group(part.q, part.k, part.v, problem, part.lse.dtype)
        d_out = with_column(grads.out, 0.0, 1.0, part.lse.dtype)
        delta = (d_out[:, : work.dim] * part.out.reshape(-1, work.dim)).sum(-1)
        d_out[:, work.dim] = -delta
    if grads.route is not None:
        d_route = torch.zeros_like(delta)
        probed = grads.probes is None or all_open or probe_rows(work, grads.probes, part.lse, d_out, d_route)
        here, _ = _near_attention(work)
        if not probed or not all_finite(here):
            return False
        rows = work.far_rows(part.opens.reshape(-1).nonzero()[:, 0]).rows
        d_route[rows] = (delta - (d_out[:, : work.dim] * here).sum(-1))[rows]
        grads.route.copy_(d_route.view_as(grads.route))
    d_q, d_k, d_v = flash_backward(
        grads.out, part.q, part.k, part.v, part.opens, part.out, part.lse, problem.softmax_scale
    )
    grads.q.copy_(d_q)
    grads.k.add_(d_k)
    grads.v.add_(d_v)
    if not all_open:
        work.set_reference(part.lse)
        sums = GradientSums(work)
        near_backward(work, sums, d_out.mul_(~part.opens.reshape(-1, 1)), sum_rows=False)
        grads.q.add_(sums.queries.mul_(problem.softmax_scale).view_as(part.q))
        grads.k.add_(sums.keys, alpha=1 / LOG2E)
        grads.v.add_(sums.values)
    return True
