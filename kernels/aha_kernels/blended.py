"""Backends that compute both outputs for every token and blend them by the route: dense cost, autograd's
gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aha_kernels.errors import InputError
from aha_kernels.problem import Problem
from aha_kernels.reference import reference_attention
from aha_kernels.sampling import draw_probes


def route_grad_weight(
    problem: Problem, route: Tensor, rate: float, seed: int | Tensor, layer: int, head_offset: int
) -> Tensor | None:
    """Returns the factor on each route's gradient [batch, queries, heads], or None where all are 1."""
    if rate >= 1.0:
        return None
    if rate == 0.0:
        return torch.zeros_like(route, dtype=torch.float32)
    drawn = draw_probes(problem, route, rate, seed, layer, head_offset)
    return torch.where(route == 0, drawn.float() / rate, 1.0)


def blended_reference(
    q: Tensor, k: Tensor, v: Tensor, route: Tensor, problem: Problem, weight: Tensor | None
) -> Tensor:
    """Returns the definition, like q; computed in fp32 at least."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = reference_attention(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        route,
        problem.window,
        query_offset=problem.query_offset,
        key_start=problem.key_start,
        key_end=problem.key_end,
        cu_seqlens=problem.cu_seqlens,
        softmax_scale=problem.softmax_scale,
        num_sink_tokens=problem.num_sink_tokens,
        route_grad_weight=weight,
    )
    return out.to(q.dtype)


def blended_flash(
    q: Tensor, k: Tensor, v: Tensor, route: Tensor, problem: Problem, weight: Tensor | None
) -> Tensor:
    """Returns flash-attn's full and windowed attention blended by the route, like q.

    Raises InputError for sinks, key_start, key_end, or queries that are not the last ones: flash-attn lacks
    them.
    """
    offset = problem.query_offset
    at_the_end = not isinstance(offset, Tensor) and offset + q.shape[1] == k.shape[1]
    if (
        problem.num_sink_tokens
        or problem.key_start is not None
        or problem.key_end is not None
        or not at_the_end
    ):
        raise InputError(
            "backend='flash' cannot compute this call: it knows no sinks, key_start, key_end, and no queries before "
            "the last key; backend='torch' can"
        )
    # flash-attn counts previous keys, without the token itself
    windows = {"all": (-1, -1), "here": (problem.window - 1, 0)}
    everything, here = (_flash(q, k, v, problem, window) for window in windows.values())
    hard = route.detach().to(q.dtype)
    blend = route if weight is None else hard + (route - route.detach()) * weight
    blend = blend.to(q.dtype)[..., None]
    return blend * everything + (1 - blend) * here


def _flash(q: Tensor, k: Tensor, v: Tensor, problem: Problem, window: tuple[int, int]) -> Tensor:
    """Returns causal flash attention; window counts keys before and after the token's own."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    options = {"softmax_scale": problem.softmax_scale, "causal": True, "window_size": window}
    if problem.cu_seqlens is None:
        return flash_attn_func(q, k, v, **options)
    borders = problem.cu_seqlens.to(q.device, torch.int32)
    longest = q.shape[1]
    out = flash_attn_varlen_func(q[0], k[0], v[0], borders, borders, longest, longest, **options)
    return out[None]
