"""Torch path, forward and backward: each segment by the method that suits its length."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from aha_kernels.banded import banded_backward, banded_forward
from aha_kernels.call import Activations, Gradients
from aha_kernels.dense import dense_backward, dense_forward
from aha_kernels.flash import flash_suits
from aha_kernels.masked import mask_suits, masked_backward, masked_forward
from aha_kernels.mostly_open import mostly_open_backward, mostly_open_forward
from aha_kernels.pool import run_all
from aha_kernels.problem import Problem, compute_dtype
from aha_kernels.segments import Segment

SHORT = 224 * 224  # scores per head of a segment up to which one dense pass is faster
ROWS_AT_ONCE = 16384  # rows, of all heads together, that are computed at a time
ALONE = 512 * 512  # scores per head of a segment up to which threads cost more than they gain


def takes_bands(segment: Segment) -> bool:
    """Returns whether a segment is long enough for near bands and far rows."""
    return segment.ends_at_last_key and segment.num_rows * segment.num_keys > SHORT


def threads_for(problem: Problem, q: Tensor, k: Tensor) -> int:
    """Returns on how many threads the KV groups of a call are worth spreading."""
    large = problem.cu_seqlens is not None or q.shape[1] * k.shape[1] > ALONE
    return torch.get_num_threads() if large and q.device.type == "cpu" else 1


def torch_forward(
    q: Tensor, k: Tensor, v: Tensor, route: Tensor, problem: Problem, router_grad_rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output and the log-sum-exps of chosen and near keys, as the operator in aha_kernels.ops."""
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=compute_dtype(q.dtype))
    segments = problem.segments(q.shape[0], q.shape[1], k.shape[1])
    out = _per_query(q, segments)
    lse_here = lse.clone() if router_grad_rate > 0.0 else None
    call = Activations(q, k, v, route, out, lse, lse_here)
    tasks = []
    for segment in segments:
        if mask_suits(segment, q.device):
            masked_forward(call.of_segment(segment), problem)
        elif takes_bands(segment):
            tasks += [partial(_forward_part, call, problem, segment, kv) for kv in range(k.shape[2])]
        else:
            dense_forward(call, problem, segment)
    run_all(tasks, threads_for(problem, q, k))
    return out, lse, lse.new_empty(0) if lse_here is None else lse_here


def _per_query(q: Tensor, segments: list[Segment]) -> Tensor:
    """Returns a contiguous tensor like q, zero unless the segments cover, and so will write, every query."""
    whole = sum(segment.num_rows for segment in segments) == q.shape[0] * q.shape[1]
    make = torch.empty_like if whole else torch.zeros_like
    return make(q, memory_format=torch.contiguous_format)


def _heads(call: Activations, segment: Segment, kv_head: int) -> Iterator[slice]:
    """Yields the query heads of a KV group, few enough at a time that copies of them, if any, stay small."""
    return call.heads_of_group(kv_head, max(1, ROWS_AT_ONCE // segment.num_rows))


def _forward_part(call: Activations, problem: Problem, segment: Segment, kv_head: int) -> None:
    for heads in _heads(call, segment, kv_head):
        part = call.part(segment, kv_head, heads)
        attend = mostly_open_forward if flash_suits(part.opens, segment.num_keys) else banded_forward
        if not attend(part, problem):
            dense_forward(call.of_heads(kv_head, heads), problem, segment)


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
    call = Activations(q, k, v, route, out, lse, lse_here if router_grad_rate > 0.0 else None)
    if probes is None and router_grad_rate >= 1.0:
        probes = ~call.opens
    segments = problem.segments(q.shape[0], q.shape[1], k.shape[1])
    grads = Gradients(
        q=_per_query(q, segments),
        k=torch.zeros_like(k, memory_format=torch.contiguous_format, dtype=lse.dtype),
        v=torch.zeros_like(v, memory_format=torch.contiguous_format, dtype=lse.dtype),
        out=grad_out,
        route=torch.zeros_like(lse) if router_grad_rate > 0.0 else None,
        probes=probes,
    )
    tasks = []
    for segment in segments:
        if mask_suits(segment, q.device):
            masked_backward(call.of_segment(segment), grads.of_segment(segment), problem)
        elif takes_bands(segment):
            tasks += [partial(_backward_part, call, grads, problem, segment, kv) for kv in range(k.shape[2])]
        else:
            dense_backward(call, grads, problem, segment)
    run_all(tasks, threads_for(problem, q, k))
    grad_route = lse.new_empty(0) if grads.route is None else grads.route
    if probes is not None and 0.0 < router_grad_rate < 1.0:
        grad_route = torch.where(probes, grad_route / router_grad_rate, grad_route)
    return grads.q, grads.k.to(k.dtype), grads.v.to(v.dtype), grad_route


def _backward_part(
    call: Activations, grads: Gradients, problem: Problem, segment: Segment, kv_head: int
) -> None:
    for heads in _heads(call, segment, kv_head):
        part = call.part(segment, kv_head, heads)
        mostly_open = flash_suits(part.opens, segment.num_keys)
        differentiate = mostly_open_backward if mostly_open else banded_backward
        if not differentiate(part, grads.part(segment, kv_head, heads), problem):
            of_heads = (call.of_heads(kv_head, heads), grads.of_heads(kv_head, heads))
            dense_backward(*of_heads, problem, segment)
