"""Torch path, forward and backward: each segment by the method that suits its length."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from aha_kernels.banded import banded_backward, banded_forward
from aha_kernels.dense import dense_backward, dense_forward
from aha_kernels.flash import flash_suits
from aha_kernels.masked import MaskedSegment, mask_suits
from aha_kernels.mostly_open import mostly_open_backward, mostly_open_forward
from aha_kernels.pool import run_all
from aha_kernels.problem import Problem, compute_dtype
from aha_kernels.segments import Segment

SHORT = 224 * 224  # scores per head of a segment up to which one dense pass is faster
ALONE = 512 * 512  # scores per head of a segment up to which threads cost more than they gain


def takes_bands(segment: Segment) -> bool:
    """Returns whether a segment is long enough for near bands and far rows."""
    return segment.ends_at_last_key and segment.num_rows * segment.num_keys > SHORT


def threads_for(problem: Problem, q: Tensor, k: Tensor) -> int:
    """Returns on how many threads the KV groups of a call are worth spreading."""
    large = problem.cu_seqlens is not None or q.shape[1] * k.shape[1] > ALONE
    return torch.get_num_threads() if large and q.device.type == "cpu" else 1


def torch_forward(
    q: Tensor, k: Tensor, v: Tensor, route: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output and the log-sum-exps of chosen and near keys, as the operator in aha_kernels.ops."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=compute_dtype(q.dtype))
    lse_here = lse.clone()
    opens = route.bool()
    group = q.shape[2] // k.shape[2]

    def banded(segment: Segment, kv_head: int) -> None:
        b, heads = segment.batch, slice(kv_head * group, (kv_head + 1) * group)
        rows, keys = segment.rows, segment.keys
        inputs = (q[b, rows, heads], k[b, keys, kv_head], v[b, keys, kv_head], opens[b, rows, heads])
        results = (out[b, rows, heads], lse[b, rows, heads])
        if flash_suits(inputs[3], segment.num_keys):
            done = mostly_open_forward(*inputs, problem, *results)
        else:
            done = banded_forward(*inputs, problem, *results, lse_here[b, rows, heads])
        if not done:
            one = slice(kv_head, kv_head + 1)
            dense_forward(
                q[:, :, heads],
                k[:, :, one],
                v[:, :, one],
                opens[:, :, heads],
                problem,
                segment,
                out[:, :, heads],
                lse[:, :, heads],
                lse_here[:, :, heads],
            )

    def masked(segment: Segment) -> None:
        b, rows, keys = segment.batch, segment.rows, segment.keys
        work = MaskedSegment(q[b, rows], k[b, keys], v[b, keys], opens[b, rows], problem, lse.dtype)
        out[b, rows], lse[b, rows] = work.attend(opens[b, rows])

    tasks = []
    for segment in problem.segments(q.shape[0], q.shape[1], k.shape[1]):
        if mask_suits(segment, q.device):
            masked(segment)
        elif takes_bands(segment):
            tasks += [partial(banded, segment, kv_head) for kv_head in range(k.shape[2])]
        else:
            dense_forward(q, k, v, opens, problem, segment, out, lse, lse_here)
    run_all(tasks, threads_for(problem, q, k))
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
    """Returns the gradients of q, k, v and route, as the operator in aha_kernels.ops."""
    dtype = compute_dtype(q.dtype)
    opens = route.bool()
    if probes is None and router_grad_rate >= 1.0:
        probes = ~opens
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_k = torch.zeros_like(k, memory_format=torch.contiguous_format, dtype=dtype)
    grad_v = torch.zeros_like(grad_k)
    grad_route = torch.zeros_like(lse) if router_grad_rate > 0.0 else None
    group = q.shape[2] // k.shape[2]

    def banded(segment: Segment, kv_head: int) -> None:
        b, heads = segment.batch, slice(kv_head * group, (kv_head + 1) * group)
        rows, keys = segment.rows, segment.keys
        inputs = (q[b, rows, heads], k[b, keys, kv_head], v[b, keys, kv_head], opens[b, rows, heads])
        chosen = (
            None if probes is None else probes[b, rows, heads],
            out[b, rows, heads],
            lse[b, rows, heads],
        )
        gradients = (grad_q[b, rows, heads], grad_k[b, keys, kv_head], grad_v[b, keys, kv_head])
        d_route = None if grad_route is None else grad_route[b, rows, heads]
        d_out = grad_out[b, rows, heads]
        if flash_suits(inputs[3], segment.num_keys):
            done = mostly_open_backward(d_out, *inputs, *chosen, problem, *gradients, d_route)
        else:
            near = lse_here[b, rows, heads]
            done = banded_backward(d_out, *inputs, *chosen, near, problem, *gradients, d_route)
        if not done:
            one = slice(kv_head, kv_head + 1)
            dense_backward(
                grad_out[:, :, heads],
                q[:, :, heads],
                k[:, :, one],
                v[:, :, one],
                opens[:, :, heads],
                None if probes is None else probes[:, :, heads],
                out[:, :, heads],
                lse[:, :, heads],
                problem,
                segment,
                grad_q[:, :, heads],
                grad_k[:, :, one],
                grad_v[:, :, one],
                None if grad_route is None else grad_route[:, :, heads],
            )

    def masked(segment: Segment) -> None:
        b, rows, keys = segment.batch, segment.rows, segment.keys
        work = MaskedSegment(q[b, rows], k[b, keys], v[b, keys], opens[b, rows], problem, lse.dtype)
        d_q, d_k, d_v = work.gradients(grad_out[b, rows], out[b, rows], lse[b, rows])
        grad_q[b, rows] = d_q
        grad_k[b, keys] += d_k.unflatten(1, (k.shape[2], group)).sum(2)
        grad_v[b, keys] += d_v.unflatten(1, (k.shape[2], group)).sum(2)
        if grad_route is not None and work.beyond is not None:
            wanted = opens[b, rows] if probes is None else opens[b, rows] | probes[b, rows]
            grad_route[b, rows] = work.route_gradient(grad_out[b, rows], out[b, rows], wanted)

    tasks = []
    for segment in problem.segments(q.shape[0], q.shape[1], k.shape[1]):
        if mask_suits(segment, q.device):
            masked(segment)
        elif takes_bands(segment):
            tasks += [partial(banded, segment, kv_head) for kv_head in range(k.shape[2])]
        else:
            dense_backward(
                grad_out,
                q,
                k,
                v,
                opens,
                probes,
                out,
                lse,
                problem,
                segment,
                grad_q,
                grad_k,
                grad_v,
                grad_route,
            )
    run_all(tasks, threads_for(problem, q, k))
    if grad_route is None:
        grad_route = lse.new_empty(0)
    elif probes is not None and router_grad_rate < 1.0:
        grad_route = torch.where(probes, grad_route / router_grad_rate, grad_route)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_route
