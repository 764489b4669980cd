"""Triton kernels of the backward pass: no atomics, one writer for every value, so two runs agree in every
bit.

Queries: a window pass over all rows, then a pass over the compacted all-rows that overwrites theirs. Keys
    and values: one program per block of keys and KV head meets the rows whose windows reach it, then its
    part of the sorted row list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aha_kernels.triton_steps import (
    here_block,
    here_blocks,
    key_range,
    key_step,
    list_codes,
    load_keys,
    load_rows,
    load_tile,
    locate_rows,
    query_step,
    store_tile,
)


@triton.jit
def near_query_kernel(
    Q,
    K,
    V,
    D_OUT,
    LSE_HERE,
    DELTA,
    LISTED,
    D_Q,
    D_ROUTE,
    FIRST,
    STOP,
    OFFSET,
    num_queries,
    num_keys,
    kv_heads,
    lists,
    window,
    scale,
    softmax_scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    ROUTER_GRAD: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of here-rows' queries, and the router gradient ``<dO, O_all - O_here>`` of the all-rows."""
    pid = tl.program_id(0)
    item = (pid % lists) // kv_heads
    kv_head = pid % kv_heads
    code = (pid // lists) * BLOCK_M + tl.arange(0, BLOCK_M)
    query, place, q_row = locate_rows(code, item, kv_head, num_queries, kv_heads, stride_qt, stride_qh, GROUP)
    ok = query < num_queries
    first, stop = key_range(FIRST, STOP, item, query, num_queries, num_keys, ok)
    near = tl.maximum(first, tl.load(OFFSET + item) + query - window + 1)

    item64, kv_head64 = item.to(tl.int64), kv_head.to(tl.int64)
    q, d_out, lse, delta = load_rows(
        Q + item64 * stride_qb, D_OUT, LSE_HERE, DELTA, place, q_row, ok, D, BLOCK_D
    )
    k_base = K + item64 * stride_kb + kv_head64 * stride_kh
    v_base = V + item64 * stride_vb + kv_head64 * stride_vh
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    near_begin, sink_begin, sink_blocks, blocks = here_blocks(first, near, stop, num_keys, SINKS, BLOCK_N)
    for i in range(0, blocks):
        start, visible = here_block(
            i, first, near, stop, num_keys, near_begin, sink_begin, sink_blocks, SINKS, BLOCK_N
        )
        k = load_keys(k_base, start, stride_kt, num_keys, BLOCK_N, D, BLOCK_D)
        v = load_keys(v_base, start, stride_vt, num_keys, BLOCK_N, D, BLOCK_D)
        acc, row_sum = query_step(q, d_out, lse, delta, k, v, acc, row_sum, visible, scale, PRECISION)
    store_tile(D_Q, place * D, 1, ok, acc * softmax_scale, D, BLOCK_D)
    if ROUTER_GRAD:
        # Relative to the near keys the sum is <dO, O_here> - <dO, O>, and O is O_all in the listed rows.
        listed = tl.load(LISTED + place, mask=ok, other=0) != 0
        empty = tl.load(LSE_HERE + place, mask=ok, other=0.0) == float("-inf")
        tl.store(D_ROUTE + place, tl.where(empty, delta, -row_sum), mask=ok & listed)


@triton.jit
def rows_query_kernel(
    Q,
    K,
    V,
    D_OUT,
    LSE,
    DELTA,
    D_Q,
    WORK,
    CODES,
    COUNTS,
    FIRST,
    STOP,
    num_queries,
    num_keys,
    kv_heads,
    blocks,
    scale,
    softmax_scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the listed rows' queries, over all their keys; WORK names block after block, longest
    first.
    """
    entry = tl.load(WORK + tl.program_id(0))
    if entry < 0:
        return
    which = entry // blocks
    item, kv_head = which // kv_heads, which % kv_heads
    code, ok = list_codes(
        CODES, which, num_queries * GROUP, entry % blocks * BLOCK_M, tl.load(COUNTS + which), BLOCK_M
    )
    query, place, q_row = locate_rows(code, item, kv_head, num_queries, kv_heads, stride_qt, stride_qh, GROUP)
    first, stop = key_range(FIRST, STOP, item, query, num_queries, num_keys, ok)

    item64, kv_head64 = item.to(tl.int64), kv_head.to(tl.int64)
    q, d_out, lse, delta = load_rows(Q + item64 * stride_qb, D_OUT, LSE, DELTA, place, q_row, ok, D, BLOCK_D)
    k_base = K + item64 * stride_kb + kv_head64 * stride_kh
    v_base = V + item64 * stride_vb + kv_head64 * stride_vh
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for start in range(tl.min(first) // BLOCK_N * BLOCK_N, tl.max(stop), BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        k = load_keys(k_base, start, stride_kt, num_keys, BLOCK_N, D, BLOCK_D)
        v = load_keys(v_base, start, stride_vt, num_keys, BLOCK_N, D, BLOCK_D)
        acc, row_sum = query_step(q, d_out, lse, delta, k, v, acc, row_sum, visible, scale, PRECISION)
    store_tile(D_Q, place * D, 1, ok, acc * softmax_scale, D, BLOCK_D)


@triton.jit
def key_value_kernel(
    Q,
    K,
    V,
    D_OUT,
    LSE,
    DELTA,
    LISTED,
    D_K,
    D_V,
    WORK,
    CODES,
    NEAR_ROWS,
    LIST_ROWS,
    FIRST,
    STOP,
    OFFSET,
    num_queries,
    num_keys,
    kv_heads,
    blocks,
    window,
    scale,
    softmax_scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of BLOCK_N keys and values of one KV head; WORK names block after block, most rows first."""
    entry = tl.load(WORK + tl.program_id(0))
    which = entry // blocks
    item, kv_head = which // kv_heads, which % kv_heads
    item64, kv_head64 = item.to(tl.int64), kv_head.to(tl.int64)
    key = entry % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    key_ok = key < num_keys
    key64 = key.to(tl.int64)
    k = load_tile(K + item64 * stride_kb + kv_head64 * stride_kh, key64, stride_kt, key_ok, D, BLOCK_D)
    v = load_tile(V + item64 * stride_vb + kv_head64 * stride_vh, key64, stride_vt, key_ok, D, BLOCK_D)
    d_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    d_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    q_base = Q + item64 * stride_qb

    # Here-rows: those whose window can reach these keys, then with sinks all later ones.
    offset = tl.load(OFFSET + item)
    near_rows = NEAR_ROWS + (item * blocks + entry % blocks) * 2
    for start in range(tl.load(near_rows) * GROUP, tl.load(near_rows + 1) * GROUP, BLOCK_M):
        query, place, q_row = locate_rows(
            start + tl.arange(0, BLOCK_M), item, kv_head, num_queries, kv_heads, stride_qt, stride_qh, GROUP
        )
        ok = query < num_queries
        first, stop = key_range(FIRST, STOP, item, query, num_queries, num_keys, ok)
        near = tl.maximum(first, offset + query - window + 1)
        inside = key[:, None] >= near[None, :]
        if SINKS > 0:
            inside = inside | ((key[:, None] >= first[None, :]) & (key[:, None] < first[None, :] + SINKS))
        here = tl.load(LISTED + place, mask=ok, other=1) == 0
        visible = inside & (key[:, None] < stop[None, :]) & here[None, :]
        q, d_out, lse, delta = load_rows(q_base, D_OUT, LSE, DELTA, place, q_row, ok, D, BLOCK_D)
        d_k, d_v = key_step(k, v, q, d_out, lse, delta, visible, d_k, d_v, scale, PRECISION)

    # All-rows: the part of the sorted list that sees these keys.
    list_rows = LIST_ROWS + entry * 2
    list_end = tl.load(list_rows + 1)
    for start in range(tl.load(list_rows), list_end, BLOCK_M):
        code, ok = list_codes(CODES, which, num_queries * GROUP, start, list_end, BLOCK_M)
        query, place, q_row = locate_rows(
            code, item, kv_head, num_queries, kv_heads, stride_qt, stride_qh, GROUP
        )
        first, stop = key_range(FIRST, STOP, item, query, num_queries, num_keys, ok)
        visible = (key[:, None] >= first[None, :]) & (key[:, None] < stop[None, :])
        q, d_out, lse, delta = load_rows(q_base, D_OUT, LSE, DELTA, place, q_row, ok, D, BLOCK_D)
        d_k, d_v = key_step(k, v, q, d_out, lse, delta, visible, d_k, d_v, scale, PRECISION)

    place = ((item64 * num_keys + key64) * kv_heads + kv_head64) * D
    store_tile(D_K, place, 1, key_ok, d_k * softmax_scale, D, BLOCK_D)
    store_tile(D_V, place, 1, key_ok, d_v, D, BLOCK_D)
