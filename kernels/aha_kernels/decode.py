"""Decoding: a few new queries against a key-value cache, with work in proportion to what the routes open."""

from __future__ import annotations

from dataclasses import dataclass

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
    starts = [0] * q.shape[0] if key_start is None else [max(0, x) for x in key_start.tolist()]
    opens = route.bool()
    with torch.no_grad():
        items = []
        for item, (start, length) in enumerate(zip(starts, cache_lengths.tolist(), strict=True)):
            pages = None if block_table is None else block_table[item].long()
            cache = _Cache(k_cache, v_cache, item, pages)
            shape = _Reach(start, length, q.shape[1], window, num_sink_tokens)
            items.append(_decode_item(q[item] * scale, opens[item], cache, shape))
    return torch.stack(items)


@dataclass(frozen=True)
class _Reach:
    """What the new tokens of an item can see: keys from ``start`` on, up to ``length``, the last of them the newest."""

    start: int
    length: int
    new_tokens: int
    window: int
    sinks: int

    @property
    def first_near(self) -> int:
        """The first key in the window of the first new token."""
        return max(self.start, self.length - self.new_tokens - self.window + 1)

    def near(self, device: torch.device) -> range | Tensor:
        """Returns the positions of all keys that are near to some new token, and of the sinks."""
        sinks_stop = min(self.start + self.sinks, self.first_near)
        if sinks_stop <= self.start:
            return range(self.first_near, self.length)
        sinks = torch.arange(self.start, sinks_stop, device=device)
        return torch.cat([sinks, torch.arange(self.first_near, self.length, device=device)])


@dataclass(frozen=True)
class _Cache:
    """Keys and values of one item of a cache, which may be in pages."""

    keys: Tensor
    values: Tensor
    item: int
    pages: Tensor | None

    def read(self, positions: range | Tensor, kv_heads: slice) -> tuple[Tensor, Tensor]:
        """Returns keys and values [kv_heads, positions, head_dim]; a range without pages is a view, not a copy."""
        if self.pages is None:
            rows = slice(positions.start, positions.stop) if isinstance(positions, range) else positions
            found = [cache[self.item, :, kv_heads][rows] for cache in (self.keys, self.values)]
        else:
            device, size = self.keys.device, self.keys.shape[1]
            if isinstance(positions, range):
                positions = torch.arange(positions.start, positions.stop, device=device)
            page, place = self.pages[positions // size], positions % size
            found = [cache[page, place][:, kv_heads] for cache in (self.keys, self.values)]
        return found[0].transpose(0, 1), found[1].transpose(0, 1)


def _decode_item(q: Tensor, opens: Tensor, cache: _Cache, reach: _Reach) -> Tensor:
    """Returns [new_tokens, heads, head_dim]: near keys for all heads at once, then all keys where heads are open.

    q: scaled, [new_tokens, heads, head_dim]; opens: bool [new_tokens, heads].
    """
    new_tokens, heads, dim = q.shape
    kv_heads = cache.keys.shape[2]
    group = heads // kv_heads
    first_query = reach.length - new_tokens
    near = reach.near(q.device)
    visible = None
    if new_tokens > 1 or reach.length <= reach.start:
        positions = torch.arange(near.start, near.stop, device=q.device) if isinstance(near, range) else near
        query = torch.arange(first_query, reach.length, device=q.device)[:, None]
        in_window = (positions > query - reach.window) | (positions < reach.start + reach.sinks)
        visible = ((positions <= query) & in_window).repeat_interleave(group, 0)  # [new_tokens * group, keys]
    by_group = q.view(new_tokens, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    out = _attend(by_group, *cache.read(near, slice(None)), visible)  # [kv_heads, new_tokens * group, dim]
    out = out.view(kv_heads, new_tokens, group, dim).transpose(0, 1).reshape(new_tokens, heads, dim)
    if reach.length - reach.window <= reach.start:
        return out  # all keys are near to the newest token, and so to the others
    far = range(reach.start, reach.length)
    opened = opens.view(new_tokens, kv_heads, group).any(2).any(0).nonzero()[:, 0].tolist()
    for kv_head in opened:
        token, head = opens[:, kv_head * group : (kv_head + 1) * group].nonzero(as_tuple=True)
        head = head + kv_head * group
        visible = None
        if new_tokens > 1:
            visible = torch.arange(far.start, far.stop, device=q.device) <= (token + first_query)[:, None]
        keys, values = cache.read(far, slice(kv_head, kv_head + 1))
        out[token, head] = _attend(q[token, head][None], keys, values, visible)[0]
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """Returns [heads, rows, dim]: attention of scaled q [heads, rows, dim] over keys [heads, keys, dim].

    A row sees the keys where visible [rows, keys] is set, all without it; its output is zero where there are none.
    """
    dtype = compute_dtype(q.dtype)
    scores = (q @ keys.transpose(1, 2)).to(dtype)
    if visible is None:
        return torch.softmax(scores, -1).to(values.dtype) @ values
    weights = torch.softmax(scores.masked_fill_(~visible, float("-inf")), -1)
    return weights.masked_fill_(~visible.any(-1)[:, None], 0.0).to(values.dtype) @ values
