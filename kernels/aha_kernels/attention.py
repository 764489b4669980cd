"""The public function."""

from __future__ import annotations

import torch
from torch import Tensor

from aha_kernels.arguments import check_positions, check_tensors, check_window
from aha_kernels.backends import choose_backend
from aha_kernels.blended import blended_flash, blended_reference, route_grad_weight
from aha_kernels.ops import attention_op
from aha_kernels.problem import Problem
from aha_kernels.sampling import parse_router_grad


def aha_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    route: Tensor,
    window: int,
    *,
    query_offset: int | Tensor = 0,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    num_sink_tokens: int = 0,
    router_grad: str = "exact",
    router_seed: int | Tensor = 0,
    layer: int = 0,
    head_offset: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Returns All-or-Here attention: full causal attention where route is 1, the last ``window`` keys where it is 0.

    q: [batch, queries, heads, head_dim]; k, v: [batch, keys, kv_heads, head_dim], any strides; the result
        is like q.
    route: [batch, queries, heads], values 0 and 1, float32 with gradient ``<dO, O_all - O_here>``, or bool
        without.
    window: visible keys of a *here* token, the token itself included, at least 1.
    query_offset: query i sits at position ``query_offset + i``, keys at 0, 1, ...; int, or integers [batch].
    key_start, key_end: integers [batch]; only keys ``key_start <= j < key_end`` exist (left padding, caches).
    cu_seqlens: int32 [documents + 1] borders of documents packed into one row (batch 1, as many queries as keys);
        attention never crosses them.
    softmax_scale: factor on the scores, ``head_dim ** -0.5`` by default.
    num_sink_tokens: the first tokens (of each document) that *here* always sees too.
    router_grad: "exact" gives every token its route gradient; "sampled:RATE" estimates it without bias from the
        all-tokens and a random share of the here-tokens; "none" gives none (inference, frozen router).
    router_seed, layer, head_offset: counters of the random share, which is a function of (router_seed, layer,
        head_offset + head, position) alone. Vary router_seed with the step and the sample: an int, or int64
        broadcastable to [batch, queries]. Positions count from the first key a query may see (its
        document's start).
    backend: "auto" for the best on this device, "torch", "triton", "reference" (the definition, tokens squared in
        memory) or "flash" (flash-attn twice, blended by the route: dense cost).

    A query that sees no key has output and gradients zero. Raises InputError (a ValueError) for bad
    arguments.
    """
    check_window(window, num_sink_tokens)
    check_tensors(q, k, v, route)
    check_positions(q, k, query_offset, key_start, key_end, cu_seqlens)
    rate = parse_router_grad(router_grad)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    chosen = choose_backend(backend, q.device, q.dtype, q.shape[-1])
    if chosen in ("reference", "flash"):
        problem = Problem(window, scale, num_sink_tokens, query_offset, key_start, key_end, cu_seqlens)
        weight = route_grad_weight(problem, route, rate, router_seed, layer, head_offset)
        compute = blended_reference if chosen == "reference" else blended_flash
        return compute(q, k, v, route, problem, weight)
    offsets = query_offset if isinstance(query_offset, Tensor) else None
    seeds = router_seed if isinstance(router_seed, torch.Tensor) else None
    return attention_op(
        q,
        k,
        v,
        route,
        window,
        scale,
        num_sink_tokens,
        0 if isinstance(query_offset, Tensor) else query_offset,
        offsets,
        key_start,
        key_end,
        cu_seqlens,
        chosen,
        rate,
        0 if isinstance(router_seed, torch.Tensor) else router_seed,
        seeds,
        layer,
        head_offset,
    )[0]
