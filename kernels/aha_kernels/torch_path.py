"""Torch path, forward and backward: each segment by the method that suits its length."""

from __future__ import annotations

import torch
from torch import Tensor

from aha_kernels.dense import dense_backward, dense_forward
from aha_kernels.problem import Problem, compute_dtype


def torch_forward(
    q: Tensor, k: Tensor, v: Tensor, route: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output and the log-sum-exps of chosen and near keys; see :func:`aha_kernels.ops.attention_op`."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=compute_dtype(q.dtype))
    lse_here = lse.clone()
    opens = route.bool()
    for segment in problem.segments(q.shape[0], q.shape[1], k.shape[1]):
        dense_forward(q, k, v, opens, problem, segment, out, lse, lse_here)
    return out, lse, lse_here


def torch_backward(
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
    """Returns the gradients of q, k, v and route; see :func:`aha_kernels.ops.attention_backward_op`."""
    dtype = compute_dtype(q.dtype)
    opens = route.bool()
    if probes is None and router_grad_rate >= 1.0:
        probes = ~opens
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_k = torch.zeros_like(k, memory_format=torch.contiguous_format, dtype=dtype)
    grad_v = torch.zeros_like(grad_k)
    grad_route = torch.zeros_like(lse) if router_grad_rate > 0.0 else None
    for segment in problem.segments(q.shape[0], q.shape[1], k.shape[1]):
        dense_backward(
            grad_out, q, k, v, opens, probes, out, lse, problem, segment, grad_q, grad_k, grad_v, grad_route
        )
    if grad_route is None:
        grad_route = lse.new_empty(0)
    elif probes is not None and router_grad_rate < 1.0:
        grad_route = torch.where(probes, grad_route / router_grad_rate, grad_route)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_route
