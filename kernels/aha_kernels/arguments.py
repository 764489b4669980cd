"""Refuses arguments that cannot be computed, each in one sentence. Reads shapes only, never values on a
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aha_kernels.errors import InputError

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_window(window: int, num_sink_tokens: int) -> None:
    """Raises InputError unless window >= 1 and num_sink_tokens >= 0 are integers."""
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise InputError(
            f"window is {window!r}, but must be an integer of at least 1: it counts visible keys, "
            "the token itself included"
        )
    if not isinstance(num_sink_tokens, int) or num_sink_tokens < 0:
        raise InputError(f"num_sink_tokens is {num_sink_tokens!r}, but must be an integer of at least 0")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, route: Tensor) -> None:
    """Raises InputError unless q, k, v and route fit together in shape, dtype and device."""
    if q.dim() != 4 or k.dim() != 4:
        raise InputError(
            "q and k must be [batch, tokens, heads, head_dim], but have shapes "
            f"{list(q.shape)} and {list(k.shape)}"
        )
    if k.shape != v.shape:
        raise InputError(f"k and v must have one shape, but are {list(k.shape)} and {list(v.shape)}")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise InputError(f"q {list(q.shape)} and k {list(k.shape)} differ in batch or head_dim")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise InputError(f"the {q.shape[2]} query heads cannot be divided among {k.shape[2]} key-value heads")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise InputError(
            f"q, k and v must share one of the dtypes bfloat16, float16, float32 and float64, but are "
            f"{q.dtype}, {k.dtype} and {v.dtype}"
        )
    if route.shape != q.shape[:3]:
        raise InputError(
            f"route must be [batch, tokens, heads] = {list(q.shape[:3])} like q, but is {list(route.shape)}"
        )
    if route.dtype not in (torch.bool, torch.float32, torch.float64):
        raise InputError(f"route must be float32 (or bool where it needs no gradient), but is {route.dtype}")
    if not q.device == k.device == v.device == route.device:
        raise InputError(
            "q, k, v and route must be on one device, but are on "
            f"{q.device}, {k.device}, {v.device}, {route.device}"
        )


def check_positions(
    q: Tensor,
    k: Tensor,
    query_offset: int | Tensor,
    key_start: Tensor | None,
    key_end: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raises InputError unless the index arguments have the right type and shape and may be combined."""
    batch = q.shape[0]
    per_item = {"key_start": key_start, "key_end": key_end}
    if isinstance(query_offset, Tensor):
        per_item["query_offset"] = query_offset
    elif not isinstance(query_offset, int) or query_offset < 0:
        raise InputError(
            f"query_offset is {query_offset!r}, but must be an integer of at least 0, or integers [batch]"
        )
    for name, value in per_item.items():
        if value is not None and (value.shape != (batch,) or value.is_floating_point()):
            raise InputError(
                f"{name} must hold one integer per batch item, [{batch}], "
                f"but is {value.dtype} {list(value.shape)}"
            )
    if cu_seqlens is None:
        return
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"cu_seqlens must be int32 [documents + 1], but is {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if batch != 1 or q.shape[1] != k.shape[1]:
        raise InputError(
            "cu_seqlens needs batch 1 and as many queries as keys, "
            f"but q is {list(q.shape)} and k is {list(k.shape)}"
        )
    if isinstance(query_offset, Tensor) or query_offset != 0 or key_start is not None or key_end is not None:
        raise InputError(
            "cu_seqlens cannot be combined with query_offset, key_start or key_end: "
            "it states the borders itself"
        )


def check_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    route: Tensor,
    cache_lengths: Tensor,
    block_table: Tensor | None,
    key_start: Tensor | None,
) -> None:
    """Raises InputError unless new queries, cache, lengths and page table fit together."""
    if q.dim() != 4 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or q.shape[3] != k_cache.shape[3]:
        raise InputError(
            "q, k_cache and v_cache must be [.., tokens, heads, head_dim] with one head_dim, but are "
            f"{list(q.shape)}, {list(k_cache.shape)} and {list(v_cache.shape)}"
        )
    batch = q.shape[0]
    if q.shape[2] % k_cache.shape[2]:
        raise InputError(
            f"the {q.shape[2]} query heads cannot be divided among {k_cache.shape[2]} key-value heads"
        )
    if route.shape != q.shape[:3]:
        raise InputError(f"route must be {list(q.shape[:3])} like q, but is {list(route.shape)}")
    for name, value in (("cache_lengths", cache_lengths), ("key_start", key_start)):
        if value is not None and (value.shape != (batch,) or value.is_floating_point()):
            raise InputError(
                f"{name} must hold one integer per batch item, [{batch}], but is {list(value.shape)}"
            )
    if block_table is None and k_cache.shape[0] != batch:
        raise InputError(
            f"the cache holds {k_cache.shape[0]} items, but q has {batch}; a paged cache needs block_table"
        )
    if block_table is not None and (block_table.dim() != 2 or block_table.shape[0] != batch):
        raise InputError(f"block_table must be [{batch}, pages], but is {list(block_table.shape)}")
    if not cache_lengths.is_cuda and batch:
        pages = 1 if block_table is None else block_table.shape[1]
        shortest, longest, room = int(cache_lengths.min()), int(cache_lengths.max()), pages * k_cache.shape[1]
        if longest > room:
            raise InputError(f"cache_lengths reaches {longest}, but the cache has room for {room} tokens")
        if shortest < q.shape[1]:
            raise InputError(
                f"cache_lengths is as short as {shortest}, but must count the {q.shape[1]} new tokens too"
            )
