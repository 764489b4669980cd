"""Torch path for KV groups in which most rows see all keys: PyTorch's causal kernel for those, and a near
pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aha_kernels.banded import Gradients, near_backward, probe_rows
from aha_kernels.flash import flash_backward, flash_forward
from aha_kernels.group import Group, all_finite, with_column
from aha_kernels.problem import Problem


def mostly_open_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    opens: Tensor,
    problem: Problem,
    out: Tensor,
    lse: Tensor,
) -> bool:
    """Writes output and log-sum-exp of the chosen keys; arguments and result as banded_forward.

    The log-sum-exp of the near keys is left alone: :func:`mostly_open_backward` does not read it.
    """
    everything, lse_all = flash_forward(q, k, v, problem.softmax_scale, lse.dtype)
    if bool(opens.all()):
        out.copy_(everything)
        lse.copy_(lse_all)
        return True
    work = Group(q, k, v, problem, lse.dtype)
    here, lse_here = _near_attention(work)
    if not all_finite(here):
        return False
    out.copy_(torch.where(opens[..., None], everything, here.view_as(q)))
    lse.copy_(torch.where(opens, lse_all, lse_here.view_as(lse)))
    return True


def _near_attention(work: Group) -> tuple[Tensor, Tensor]:
    """Returns *here* attention of every row [rows, dim] and its log-sum-exp [rows]."""
    own = work.own_scores()
    work.set_reference(own)
    sums, totals = work.near_sums()
    return sums.div_(totals[:, None]), totals.log() + own


def mostly_open_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    opens: Tensor,
    probes: Tensor | None,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    grad_route: Tensor | None,
) -> bool:
    """Writes grad_q and grad_route and adds to grad_k and grad_v; arguments and result as banded_backward."""
    all_open = bool(opens.all())
    if not all_open or grad_route is not None:
        work = Group(q, k, v, problem, lse.dtype)
        d_out = with_column(grad_out, 0.0, 1.0, lse.dtype)
        delta = (d_out[:, : work.dim] * out.reshape(-1, work.dim)).sum(-1)
        d_out[:, work.dim] = -delta
    if grad_route is not None:
        d_route = torch.zeros_like(delta)
        if probes is not None and not all_open and not probe_rows(work, probes, lse, d_out, d_route):
            return False
        here, _ = _near_attention(work)
        if not all_finite(here):
            return False
        rows = work.far_rows(opens.reshape(-1).nonzero()[:, 0]).rows
        d_route[rows] = (delta - (d_out[:, : work.dim] * here).sum(-1))[rows]
        grad_route.copy_(d_route.view_as(grad_route))
    d_q, d_k, d_v = flash_backward(grad_out, q, k, v, opens, out, lse, problem.softmax_scale)
    grad_q.copy_(d_q)
    grad_k.add_(d_k)
    grad_v.add_(d_v)
    if not all_open:
        work.set_reference(lse)
        gradients = Gradients(work)
        near_backward(work, gradients, d_out.mul_(~opens.reshape(-1, 1)), sum_rows=False)
        grad_q.add_(gradients.queries.mul_(problem.softmax_scale).view_as(q))
        grad_k.add_(gradients.keys)
        grad_v.add_(gradients.values)
    return True
