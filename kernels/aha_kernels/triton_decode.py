"""Triton kernels for decoding: split keys, with work in proportion to what the routes open.

The work list holds one entry per (item, KV head, split): a KV group with an open head gets as many splits
as its cache has blocks of keys, a closed one gets what its window and sinks need. Full splits start before
the rests, so an open head is spread over many programs and does not hold up the launch; a second kernel
merges the splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aha_kernels.triton_geometry import decode_work
from aha_kernels.triton_path import LOG2_E, dense_last
from aha_kernels.triton_steps import (
    finish_softmax,
    load_tile,
    locate_rows,
    raise_peak,
    softmax_step,
    store_tile,
)
from aha_kernels.triton_tiles import architecture, kernel_tile

KEYS_PER_SPLIT = 512


@triton.jit
def find_entry(RUNNING, lists, number):
    """Returns the list whose running count is the first above number, and the number's place within it."""
    low = 0
    high = lists - 1
    while low < high:
        middle = (low + high) // 2
        count = tl.load(RUNNING + middle)
        low = tl.where(count > number, low, middle + 1)
        high = tl.where(count > number, middle, high)
    return low, number - count_before(RUNNING, low)


@triton.jit
def count_before(RUNNING, which):
    """Returns the running count of the list before."""
    return tl.where(which > 0, tl.load(RUNNING + tl.maximum(which - 1, 0)), 0)


@triton.jit
def cache_rows(TABLE, key, key_ok, item, pages_per_item, page_size, PAGED: tl.constexpr):
    """Returns the page (or item) and the slot in it where keys of an item lie, int64."""
    if PAGED:
        page = tl.load(TABLE + item * pages_per_item + key // page_size, mask=key_ok, other=0).to(tl.int64)
        slot = (key % page_size).to(tl.int64)
    else:
        page = tl.zeros_like(key).to(tl.int64) + item
        slot = key.to(tl.int64)
    return page, slot


@triton.jit
def decode_split_kernel(
    Q,
    K,
    V,
    ROUTE,
    LENGTHS,
    STARTS,
    TABLE,
    FULL,
    REST,
    PART_OUT,
    PART_LSE,
    new_tokens,
    kv_heads,
    lists,
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
    full = tl.load(FULL + lists - 1)
    if pid >= full + tl.load(REST + lists - 1):
        return
    which, split = find_entry(FULL, lists, pid)
    if pid >= full:
        which, _ = find_entry(REST, lists, pid - full)
        split = tl.load(FULL + which) - count_before(FULL, which)
    item, kv_head = which // kv_heads, which % kv_heads

    row = tl.arange(0, BLOCK_M)
    token, place, q_row = locate_rows(row, item, kv_head, new_tokens, kv_heads, stride_qt, stride_qh, GROUP)
    ok = token < new_tokens
    length = tl.load(LENGTHS + item)
    first = tl.load(STARTS + item)
    position = length - new_tokens + token
    opened = tl.load(ROUTE + place, mask=ok, other=0) != 0
    first_near = tl.maximum(first, length - new_tokens - window + 1)
    some_open = tl.max(opened.to(tl.int32)) > 0
    # A closed group reads [first_near, length) in its splits; the sinks, if apart, belong to its split 0.
    begin = tl.where(some_open, first, first_near) + split * split_keys
    end = tl.minimum(begin + split_keys, length)

    q = load_tile(Q + item.to(tl.int64) * stride_qb, q_row, 1, ok, D, BLOCK_D)
    k_base = K + kv_head.to(tl.int64) * stride_kh
    v_base = V + kv_head.to(tl.int64) * stride_vh
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sink_end = tl.where(some_open | (split > 0), first, tl.minimum(first + sinks, first_near))
    sink_blocks = (sink_end - first + BLOCK_N - 1) // BLOCK_N
    blocks = (end - begin + BLOCK_N - 1) // BLOCK_N
    for i in range(0, sink_blocks + blocks):
        in_sinks = i < sink_blocks
        start = tl.where(in_sinks, first + i * BLOCK_N, begin + (i - sink_blocks) * BLOCK_N)
        key = start + tl.arange(0, BLOCK_N)
        key_ok = key < tl.where(in_sinks, sink_end, end)
        page, slot = cache_rows(TABLE, key, key_ok, item, pages_per_item, page_size, PAGED)
        k = load_tile(k_base, page * stride_kb + slot * stride_kt, 1, key_ok, D, BLOCK_D)
        v = load_tile(v_base, page * stride_vb + slot * stride_vt, 1, key_ok, D, BLOCK_D)
        near = (key[None, :] > position[:, None] - window) | (key[None, :] < first + sinks)
        visible = (near | opened[:, None]) & (key[None, :] <= position[:, None]) & key_ok[None, :]
        acc, peak, total = softmax_step(q, k, v, acc, peak, total, visible, scale, True, PRECISION)
    out, lse = finish_softmax(acc, peak, total)
    slot_out = pid.to(tl.int64) * BLOCK_M + row
    store_tile(PART_OUT, slot_out * D, 1, ok, out, D, BLOCK_D)
    tl.store(PART_LSE + slot_out, lse, mask=ok)


@triton.jit
def decode_merge_kernel(
    OUT,
    FULL,
    REST,
    PART_OUT,
    PART_LSE,
    new_tokens,
    kv_heads,
    lists,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Merges the splits of one (item, KV head) by their log-sum-exps."""
    which = tl.program_id(0)
    begin = count_before(FULL, which)
    full = tl.load(FULL + which) - begin
    rest = tl.load(FULL + lists - 1) + count_before(REST, which)
    rests = tl.load(REST + which) - count_before(REST, which)
    row = tl.arange(0, BLOCK_M)
    token, place, _ = locate_rows(row, which // kv_heads, which % kv_heads, new_tokens, kv_heads, 0, 0, GROUP)
    ok = token < new_tokens
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for i in range(0, full + rests):
        entry = tl.where(i < full, begin + i, rest)
        part = tl.cast(entry, tl.int64) * BLOCK_M + row
        lse = tl.load(PART_LSE + part, mask=ok, other=float("-inf"))
        peak, safe_peak, shrink = raise_peak(peak, lse)
        weight = tl.exp2(lse - safe_peak)
        total = total * shrink + weight
        part_out = load_tile(PART_OUT, part * D, 1, ok, D, BLOCK_D)
        acc = acc * shrink[:, None] + part_out * weight[:, None]
    out, _ = finish_softmax(acc, peak, total)
    store_tile(OUT, place * D, 1, ok, out, D, BLOCK_D)


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
    group, window, lists = heads // kv_heads, min(window, 2**30), batch * kv_heads
    q, k_cache, v_cache = dense_last(q), dense_last(k_cache), dense_last(v_cache)
    tile = kernel_tile("decode", dim, q.dtype, architecture(q.device))
    block_m = max(tile.rows, triton.next_power_of_2(new_tokens * group))
    lengths = cache_lengths.to(q.device, torch.int32).contiguous()
    starts = (
        torch.zeros_like(lengths) if key_start is None else key_start.to(lengths).clamp_min(0).contiguous()
    )
    opens = (route != 0).contiguous()
    work = decode_work(opens, lengths, starts, kv_heads, window, KEYS_PER_SPLIT)
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    most = lists * max(1, triton.cdiv(capacity, KEYS_PER_SPLIT))  # programs if all groups were open
    part_out = torch.empty(most, block_m, dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(most, block_m, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    table = lengths if block_table is None else block_table.to(torch.int32).contiguous()
    shape = {"GROUP": group, "D": dim, "BLOCK_D": triton.next_power_of_2(dim), "BLOCK_M": block_m}
    decode_split_kernel[(most,)](
        q, k_cache, v_cache, opens.view(torch.uint8), lengths, starts, table, work.full, work.rest, part_out,
        part_lse, new_tokens, kv_heads, lists, table.shape[-1], k_cache.shape[1], window, sinks,
        scale * LOG2_E, KEYS_PER_SPLIT, *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
        PAGED=block_table is not None, BLOCK_N=tile.keys,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.warps,
        num_stages=tile.stages, **shape,
    )  # fmt: skip
    decode_merge_kernel[(lists,)](
        out, work.full, work.rest, part_out, part_lse, new_tokens, kv_heads, lists, **shape
    )
    return out
