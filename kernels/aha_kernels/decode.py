"""Decoding: a few new queries against a key-value cache, with work in proportion to what the routes open."""

from __future__ import annotations

import torch
from torch import Tensor

from aha_kernels.arguments import check_cache, check_window
from aha_kernels.backends import choose_backend
from aha_kernels.errors import InputError
from aha_kernels.problem import compute_dtype


def aha_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    route: Tensor,
    window: int,
    cache_lengths: Tensor,
    block_table: Tensor | None = None,
    *,
    key_start: Tensor | None = None,
    softmax_scale: float | None = None,
    num_sink_tokens: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Returns attention of the newest tokens over their cache, like q; inference only, no gradients.

    q: [batch, new_tokens, heads, head_dim], new token i of an item sits at ``cache_lengths - new_tokens +
        i``: the
        cache already holds the new tokens' keys and values.
    k_cache, v_cache: [batch, capacity, kv_heads, head_dim]; or, with block_table, pages [pages, page_size,
        kv_heads,
        head_dim], where int block_table [batch, pages_per_item] names each item's pages in order.
    route: [batch, new_tokens, heads], bool or 0 and 1. window, num_sink_tokens: as in aha_attention.
    cache_lengths: integers [batch], tokens in each item's cache. key_start: integers [batch], first key
        that exists.

    A KV group reads its whole cache only if one of its heads is open, else its window and the sinks. Raises
    InputError for arguments that do not fit.
    """
    check_window(window, num_sink_tokens)
    check_cache(q, k_cache, v_cache, route, cache_lengths, block_table, key_start)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if backend not in ("auto", "torch", "triton"):
        raise InputError(f"backend is {backend!r}, but decoding knows auto, torch and triton")
    if choose_backend(backend, q.device, q.dtype, q.shape[-1]) == "triton":
        from aha_kernels.triton_decode import triton_decode

        return triton_decode(
            q, k_cache, v_cache, route, window, cache_lengths, block_table, key_start, scale, num_sink_tokens
        )
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = [0] * q.shape[0] if key_start is None else [max(0, x) for x in key_start.tolist()]
    group = q.shape[2] // k_cache.shape[2]
    opens = route.bool()
    with torch.no_grad():
        for item, (start, length) in enumerate(zip(starts, cache_lengths.tolist(), strict=True)):
            first_near = max(start, length - q.shape[1] - window + 1)
            sinks = torch.arange(start, min(start + num_sink_tokens, first_near), device=q.device)
            near = torch.cat([sinks, torch.arange(first_near, length, device=q.device)])
            pages = None if block_table is None else block_table[item].long()
            for kv_head in range(k_cache.shape[2]):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                open_group = bool(opens[item, :, heads].any()) and first_near > start
                keys = range(start, length) if open_group else near
                positions = torch.arange(start, length, device=q.device) if open_group else near
                visible = _visible(positions, opens[item, :, heads], start, length, window, num_sink_tokens)
                out[item, :, heads] = _attend(
                    q[item, :, heads] * scale,
                    _read(k_cache, item, kv_head, keys, pages),
                    _read(v_cache, item, kv_head, keys, pages),
                    visible,
                )
    return out


def _read(cache: Tensor, item: int, kv_head: int, keys: range | Tensor, pages: Tensor | None) -> Tensor:
    """Returns [keys, head_dim] of one item and KV head; a range of an unpaged cache is a view, not a copy."""
    if pages is None:
        return (
            cache[item, keys.start : keys.stop, kv_head]
            if isinstance(keys, range)
            else cache[item, keys, kv_head]
        )
    if isinstance(keys, range):
        keys = torch.arange(keys.start, keys.stop, device=cache.device)
    page_size = cache.shape[1]
    return cache[pages[keys // page_size], keys % page_size, kv_head]


def _visible(positions: Tensor, opens: Tensor, start: int, length: int, window: int, sinks: int) -> Tensor:
    """Returns bool [new_tokens, group, keys]: which of the keys at the positions each row sees."""
    query = torch.arange(length - opens.shape[0], length, device=positions.device)[:, None, None]
    near = (positions > query - window) | (positions < start + sinks)
    return (positions <= query) & (near | opens[..., None])


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Returns [new_tokens, group, head_dim]: attention of scaled q over the visible keys, zero where there
    are none.
    """
    dtype = compute_dtype(q.dtype)
    rows = q.reshape(-1, q.shape[-1])
    scores = (rows @ keys.T).to(dtype).masked_fill_(~visible.view(rows.shape[0], -1), float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill_(~visible.any(-1).view(-1, 1), 0.0)
    return (weights.to(values.dtype) @ values).view(q.shape)
