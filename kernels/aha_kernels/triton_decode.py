"""Triton kernels for decoding: split keys, with work in proportion to what the routes open.

The work list holds one entry per (item, KV head, split): a KV group with an open head gets as many splits
as its cache has blocks of keys, a closed one gets what its window and sinks need. Entries are laid out on
the device, so an open head is spread over many programs and does not hold up the launch; a second kernel
merges the splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aha_kernels.triton_forward import load_tile, store_tile
from aha_kernels.triton_path import LOG2_E, capability
from aha_kernels.triton_tiles import decode_tile

KEYS_PER_SPLIT = 512


@triton.jit
def decode_split_kernel(
    Q,
    K,
    V,
    ROUTE,
    LENGTHS,
    STARTS,
    TABLE,
    ENTRIES,
    PART_OUT,
    PART_LSE,
    new_tokens,
    kv_heads,
    entries,
    pages_per_item,
    page_size,
    window,
    sinks,
    scale,
    split_keys,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    PAGED: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of a group's new tokens over one split of its keys, normalised, with its log-sum-exp (base
    2).
    """
    pid = tl.program_id(0)
    number = tl.load(
        ENTRIES + entries - 1
    )  # entries in use; the array is a running count per (item, KV head)
    if pid >= number:
        return
    low = 0
    high = entries - 1
    while low < high:  # the (item, KV head) whose running count exceeds this program's number
        middle = (low + high) // 2
        count = tl.load(ENTRIES + middle)
        low = tl.where(count > pid, low, middle + 1)
        high = tl.where(count > pid, middle, high)
    before = tl.load(ENTRIES + tl.maximum(low - 1, 0))
    split = pid - tl.where(low > 0, before, 0)
    item = low // kv_heads
    kv_head = low % kv_heads

    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    ok = token < new_tokens
    length = tl.load(LENGTHS + item)
    first = tl.load(STARTS + item)
    position = length - new_tokens + token
    place = (item * new_tokens + token) * (kv_heads * GROUP) + head
    opened = tl.load(ROUTE + place, mask=ok, other=0) != 0
    first_near = tl.maximum(first, length - new_tokens - window + 1)
    some_open = tl.max(opened.to(tl.int32)) > 0
    # A closed group reads [first_near, length) in its splits; the sinks, if apart, belong to its split 0.
    begin = tl.where(some_open, first, first_near) + split * split_keys
    end = tl.minimum(begin + split_keys, length)

    item64, kv_head64 = item.to(tl.int64), kv_head.to(tl.int64)
    q_rows = token.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    q = load_tile(Q + item64 * stride_qb, q_rows, 1, ok, D, BLOCK_D)
    k_base = K + kv_head64 * stride_kh
    v_base = V + kv_head64 * stride_vh
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sink_end = tl.where(some_open | (split > 0), first, tl.minimum(first + sinks, first_near))
    sink_blocks = (sink_end - first + BLOCK_N - 1) // BLOCK_N
    blocks = (end - begin + BLOCK_N - 1) // BLOCK_N
    for i in range(0, sink_blocks + blocks):
        in_sinks = i < sink_blocks
        start = tl.where(in_sinks, first + i * BLOCK_N, begin + (i - sink_blocks) * BLOCK_N)
        stop = tl.where(in_sinks, sink_end, end)
        key = start + tl.arange(0, BLOCK_N)
        key_ok = key < stop
        if PAGED:
            page = tl.load(TABLE + item * pages_per_item + key // page_size, mask=key_ok, other=0).to(
                tl.int64
            )
            slot = (key % page_size).to(tl.int64)
        else:
            page = tl.zeros([BLOCK_N], tl.int64) + item64
            slot = key.to(tl.int64)
        k = load_tile(k_base, page * stride_kb + slot * stride_kt, 1, key_ok, D, BLOCK_D)
        v = load_tile(v_base, page * stride_vb + slot * stride_vt, 1, key_ok, D, BLOCK_D)
        near = (key[None, :] > position[:, None] - window) | (key[None, :] < first + sinks)
        visible = (near | opened[:, None]) & (key[None, :] <= position[:, None]) & key_ok[None, :]
        scores = tl.where(visible, tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - safe_peak[:, None])
        shrink = tl.exp2(peak - safe_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    slot_out = pid.to(tl.int64) * BLOCK_M + row
    store_tile(PART_OUT, slot_out * D, 1, ok, acc / divisor[:, None], D, BLOCK_D)
    tl.store(PART_LSE + slot_out, tl.where(some, peak + tl.log2(divisor), float("-inf")), mask=ok)


@triton.jit
def decode_merge_kernel(
    OUT,
    ENTRIES,
    PART_OUT,
    PART_LSE,
    new_tokens,
    kv_heads,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Merges the splits of one (item, KV head) by their log-sum-exps."""
    which = tl.program_id(0)
    last = tl.load(ENTRIES + which)
    begin = tl.where(which > 0, tl.load(ENTRIES + tl.maximum(which - 1, 0)), 0)
    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    ok = token < new_tokens
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for entry in range(begin, last):
        place = tl.cast(entry, tl.int64) * BLOCK_M + row
        lse = tl.load(PART_LSE + place, mask=ok, other=float("-inf"))
        part = load_tile(PART_OUT, place * D, 1, ok, D, BLOCK_D)
        new_peak = tl.maximum(peak, lse)
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(lse - safe_peak)
        shrink = tl.exp2(peak - safe_peak)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        peak = new_peak
    item = which // kv_heads
    head = (which % kv_heads) * GROUP + row % GROUP
    place = (item * new_tokens + token).to(tl.int64) * (kv_heads * GROUP) + head
    divisor = tl.where(total > 0.0, total, 1.0)
    store_tile(OUT, place * D, 1, ok, acc / divisor[:, None], D, BLOCK_D)


def running_splits(
    opens: Tensor, lengths: Tensor, starts: Tensor, kv_heads: int, new_tokens: int, window: int
) -> Tensor:
    """Returns int32 [batch * kv_heads], the running count of splits; opens bool [batch, new_tokens, heads]."""
    batch = lengths.shape[0]
    some_open = opens.view(batch, new_tokens, kv_heads, -1).any(-1).any(1)  # [batch, kv_heads]
    first_near = torch.maximum(starts, lengths - new_tokens - window + 1)
    keys = torch.where(some_open, (lengths - starts)[:, None], (lengths - first_near)[:, None])
    splits = torch.div(keys + KEYS_PER_SPLIT - 1, KEYS_PER_SPLIT, rounding_mode="floor").clamp_min(1)
    return splits.reshape(-1).cumsum(0, dtype=torch.int32)


def triton_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    route: Tensor,
    window: int,
    cache_lengths: Tensor,
    block_table: Tensor | None,
    key_start: Tensor | None,
    scale: float,
    sinks: int,
) -> Tensor:
    """Returns attention of the new tokens over their caches, like q; arguments as in
    aha_kernels.aha_decode.
    """
    batch, new_tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    group, window = heads // kv_heads, min(window, 2**30)
    tile = decode_tile(dim, q.dtype, capability(q.device))
    block_m = max(tile.rows, triton.next_power_of_2(new_tokens * group))
    lengths = cache_lengths.to(q.device, torch.int32).contiguous()
    starts = (
        torch.zeros_like(lengths) if key_start is None else key_start.to(lengths).clamp_min(0).contiguous()
    )
    opens = (route != 0).contiguous()
    entries = running_splits(opens, lengths, starts, kv_heads, new_tokens, window)
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    most = (
        batch * kv_heads * max(1, triton.cdiv(capacity, KEYS_PER_SPLIT))
    )  # programs if all groups were open
    part_out = torch.empty(most, block_m, dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(most, block_m, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    table = entries if block_table is None else block_table.to(torch.int32).contiguous()
    shape = {"GROUP": group, "D": dim, "BLOCK_D": triton.next_power_of_2(dim), "BLOCK_M": block_m}
    decode_split_kernel[(most,)](
        q, k_cache, v_cache, opens.view(torch.uint8), lengths, starts, table, entries, part_out, part_lse,
        new_tokens,
        kv_heads, batch * kv_heads, table.shape[-1], k_cache.shape[1], window, sinks, scale * LOG2_E,
        KEYS_PER_SPLIT,
        *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3], PAGED=block_table is not None,
        BLOCK_N=tile.keys, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.warps,
        num_stages=tile.stages, **shape,
    )  # fmt: skip
    decode_merge_kernel[(batch * kv_heads,)](out, entries, part_out, part_lse, new_tokens, kv_heads, **shape)
    return out
