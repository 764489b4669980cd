"""The two operators, registered with torch.library: compile, export and checkpointing see them as opaque."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aha_kernels.errors import InputError
from aha_kernels.problem import Problem, compute_dtype
from aha_kernels.sampling import draw_probes
from aha_kernels.torch_path import torch_backward, torch_forward


def _define(name: str, function: Any) -> Any:
    """Registers function as torch operator ``aha_kernels::name`` on every device and returns the operator.

    Not ``torch.library.custom_op``: its first call imports torch.compile's machinery, seconds of start-up
    on each rank.
    """
    qualified = f"aha_kernels::{name}"
    torch.library.define(qualified, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(qualified, ("cpu", "cuda"), function)
    return getattr(torch.ops.aha_kernels, name).default


def _offset(offset: int, offsets: Tensor | None) -> int | Tensor:
    """The schema has no "int or tensor": a call gives both, and the tensor wins when there is one."""
    return offset if offsets is None else offsets


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    route: Tensor,
    window: int,
    softmax_scale: float,
    num_sink_tokens: int,
    query_offset: int,
    query_offsets: Tensor | None,
    key_start: Tensor | None,
    key_end: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
    router_grad_rate: float,
    router_seed: int,
    router_seeds: Tensor | None,
    layer: int,
    head_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (out, lse, lse_here): output like q and fp32 log-sum-exps [batch, queries, heads] of chosen
    and near keys; the last is empty where the backward pass does without (see _keeps_near_lse).
    """
    if not route.is_cuda and not bool(((route == 0) | (route == 1)).all()):
        raise InputError(
            "route holds values other than 0 and 1; pass the hard decision, with a straight-through gradient"
        )
    problem = Problem(
        window,
        softmax_scale,
        num_sink_tokens,
        _offset(query_offset, query_offsets),
        key_start,
        key_end,
        cu_seqlens,
    )
    if backend == "triton":
        from aha_kernels.triton_path import triton_forward

        return triton_forward(q, k, v, route, problem)
    return torch_forward(q, k, v, route, problem, router_grad_rate)


def _keeps_near_lse(backend: str, router_grad_rate: float) -> bool:
    """Returns whether the third result is kept: the torch path needs it for the router's gradient only."""
    return backend == "triton" or router_grad_rate > 0.0


attention_op = _define("attention", _attention)


@torch.library.register_fake("aha_kernels::attention")
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, route: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))
    backend, router_grad_rate = options[8:10]
    lse_here = torch.empty_like(lse) if _keeps_near_lse(backend, router_grad_rate) else lse.new_empty(0)
    return q.new_empty(q.shape), lse, lse_here


def _attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    route: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_here: Tensor,
    probes: Tensor | None,
    window: int,
    softmax_scale: float,
    num_sink_tokens: int,
    query_offset: int,
    query_offsets: Tensor | None,
    key_start: Tensor | None,
    key_end: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
    router_grad_rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and route; the last is empty when router_grad_rate is 0."""
    problem = Problem(
        window,
        softmax_scale,
        num_sink_tokens,
        _offset(query_offset, query_offsets),
        key_start,
        key_end,
        cu_seqlens,
    )
    saved = (grad_out, q, k, v, route, out, lse, lse_here, probes, problem, router_grad_rate)
    if backend == "triton":
        from aha_kernels.triton_path import triton_backward

        return triton_backward(*saved)
    return torch_backward(*saved)


attention_backward_op = _define("attention_backward", _attention_backward)


@torch.library.register_fake("aha_kernels::attention_backward")
def _attention_backward_fake(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    route: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_here: Tensor,
    probes: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_route = lse.new_empty(lse.shape if rest[-1] > 0 else (0,))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_route


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, route, *options = inputs
    ctx.set_materialize_grads(False)  # the log-sum-exps have no gradient: no zeros for them
    offsets, key_start, key_end, cu_seqlens = options[4:8]
    seeds = options[11]
    ctx.save_for_backward(q, k, v, route, *output, offsets, key_start, key_end, cu_seqlens, seeds)
    ctx.scalars = options[:4]
    ctx.backend, ctx.rate, ctx.seed, ctx.layer, ctx.head_offset = (
        options[8],
        options[9],
        options[10],
        *options[12:],
    )


def _backward(
    ctx: Any, grad_out: Tensor | None, _lse: Tensor | None, _here: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 18
    q, k, v, route, out, lse, lse_here, offsets, key_start, key_end, cu_seqlens, seeds = ctx.saved_tensors
    window, softmax_scale, num_sink_tokens, query_offset = ctx.scalars
    rate = ctx.rate if ctx.needs_input_grad[3] else 0.0
    probes = None
    if 0.0 < rate < 1.0:
        problem = Problem(
            window,
            softmax_scale,
            num_sink_tokens,
            _offset(query_offset, offsets),
            key_start,
            key_end,
            cu_seqlens,
        )
        seed = ctx.seed if seeds is None else seeds
        probes = draw_probes(problem, route, rate, seed, ctx.layer, ctx.head_offset)
    grads = attention_backward_op(
        grad_out,
        q,
        k,
        v,
        route,
        out,
        lse,
        lse_here,
        probes,
        window,
        softmax_scale,
        num_sink_tokens,
        query_offset,
        offsets,
        key_start,
        key_end,
        cu_seqlens,
        ctx.backend,
        rate,
    )
    grad_route = grads[3].to(route.dtype) if rate > 0.0 else None
    return *grads[:3], grad_route, *[None] * 14


torch.library.register_autograd("aha_kernels::attention", _backward, setup_context=_setup_context)
