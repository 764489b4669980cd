"""Triton kernels of the backward pass: no atomics, one writer for every value, so two runs agree in every
bit.

Queries: a window pass over all rows, then a pass over the compacted all-rows that overwrites theirs. Keys
    and values: one program per block of keys and KV head meets the rows whose windows reach it, then its
    part of the sorted row list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aha_kernels.triton_forward import load_keys, load_tile, store_tile


@triton.jit
def query_step(
    q,
    d_out,
    lse,
    delta,
    acc,
    row_sum,
    k_base,
    v_base,
    start,
    num_keys,
    stride_k,
    stride_v,
    visible,
    scale,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds one block of keys to the gradient of the queries and to the rows' sums of score gradients."""
    k = load_keys(k_base, start, stride_k, num_keys, BLOCK_N, D, BLOCK_D)
    v = load_keys(v_base, start, stride_v, num_keys, BLOCK_N, D, BLOCK_D)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    weights = tl.where(visible, tl.exp2(scores - lse[:, None]), 0.0)
    d_scores = weights * (tl.dot(d_out, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    row_sum += tl.sum(d_scores, 1)
    acc = tl.dot(d_scores.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc, row_sum


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
    query = code // GROUP
    head = kv_head * GROUP + code % GROUP
    ok = query < num_queries
    first = tl.load(FIRST + item * num_queries + query, mask=ok, other=num_keys)
    stop = tl.load(STOP + item * num_queries + query, mask=ok, other=0)
    near = tl.maximum(first, tl.load(OFFSET + item) + query - window + 1)

    item64, head64, query64 = item.to(tl.int64), head.to(tl.int64), query.to(tl.int64)
    place = (item64 * num_queries + query64) * (kv_heads * GROUP) + head64
    q = load_tile(Q + item64 * stride_qb, query64 * stride_qt + head64 * stride_qh, 1, ok, D, BLOCK_D)
    d_out = load_tile(D_OUT, place * D, 1, ok, D, BLOCK_D)
    lse = tl.load(LSE_HERE + place, mask=ok, other=0.0)
    empty = lse == float("-inf")
    lse = tl.where(empty, 0.0, lse * 1.4426950408889634)  # to base 2
    delta = tl.load(DELTA + place, mask=ok, other=0.0)
    k_base = K + item64 * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = V + item64 * stride_vb + kv_head.to(tl.int64) * stride_vh

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    begin = tl.min(tl.where(stop > near, near, num_keys)) // BLOCK_N * BLOCK_N
    for start in range(begin, tl.max(stop), BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        visible = (key[None, :] >= near[:, None]) & (key[None, :] < stop[:, None])
        if SINKS > 0:
            sink = (key[None, :] >= first[:, None]) & (key[None, :] < first[:, None] + SINKS)
            visible = visible | (sink & (key[None, :] < stop[:, None]))
        acc, row_sum = query_step(
            q, d_out, lse, delta, acc, row_sum, k_base, v_base, start, num_keys, stride_kt, stride_vt,
            visible, scale,
            BLOCK_N, D, BLOCK_D, PRECISION,
        )  # fmt: skip
    if SINKS > 0:
        sink_begin = tl.min(first)
        for start in range(sink_begin, tl.minimum(sink_begin + SINKS, begin), BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            visible = (key[None, :] >= first[:, None]) & (key[None, :] < first[:, None] + SINKS)
            visible = visible & (key[None, :] < stop[:, None]) & (key[None, :] < begin)
            acc, row_sum = query_step(
                q, d_out, lse, delta, acc, row_sum, k_base, v_base, start, num_keys, stride_kt, stride_vt,
                visible,
                scale, BLOCK_N, D, BLOCK_D, PRECISION,
            )  # fmt: skip
    store_tile(D_Q, place * D, 1, ok, acc * softmax_scale, D, BLOCK_D)
    if ROUTER_GRAD:
        # Relative to the near keys the sum is <dO, O_here> - <dO, O>, and O is O_all in the listed rows.
        listed = tl.load(LISTED + place, mask=ok, other=0) != 0
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
    CODES,
    COUNTS,
    FIRST,
    STOP,
    num_queries,
    num_keys,
    kv_heads,
    lists,
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
    """Gradient of the listed rows' queries, over all their keys; every list's longest block first."""
    pid = tl.program_id(0)
    which = pid % lists
    count = tl.load(COUNTS + which)
    block = (count + BLOCK_M - 1) // BLOCK_M - 1 - pid // lists
    if block < 0:
        return
    item = which // kv_heads
    kv_head = which % kv_heads
    place_in_list = block * BLOCK_M + tl.arange(0, BLOCK_M)
    ok = place_in_list < count
    code = tl.load(CODES + which.to(tl.int64) * num_queries * GROUP + place_in_list, mask=ok, other=0)
    query = code // GROUP
    head = kv_head * GROUP + code % GROUP
    first = tl.load(FIRST + item * num_queries + query)
    stop = tl.load(STOP + item * num_queries + query)

    item64, head64, query64 = item.to(tl.int64), head.to(tl.int64), query.to(tl.int64)
    place = (item64 * num_queries + query64) * (kv_heads * GROUP) + head64
    q = load_tile(Q + item64 * stride_qb, query64 * stride_qt + head64 * stride_qh, 1, ok, D, BLOCK_D)
    d_out = load_tile(D_OUT, place * D, 1, ok, D, BLOCK_D)
    lse = tl.load(LSE + place, mask=ok, other=0.0) * 1.4426950408889634
    delta = tl.load(DELTA + place, mask=ok, other=0.0)
    k_base = K + item64 * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = V + item64 * stride_vb + kv_head.to(tl.int64) * stride_vh

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    begin = tl.min(tl.where(ok, first, num_keys)) // BLOCK_N * BLOCK_N
    for start in range(begin, tl.max(tl.where(ok, stop, 0)), BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        acc, row_sum = query_step(
            q, d_out, lse, delta, acc, row_sum, k_base, v_base, start, num_keys, stride_kt, stride_vt,
            visible, scale,
            BLOCK_N, D, BLOCK_D, PRECISION,
        )  # fmt: skip
    store_tile(D_Q, place * D, 1, ok, acc * softmax_scale, D, BLOCK_D)


@triton.jit
def key_step(
    k,
    v,
    q,
    d_out,
    lse,
    delta,
    visible,
    d_k,
    d_v,
    scale,
    PRECISION: tl.constexpr,
):
    """Adds a block of rows to the gradients of one block of keys and values; visible [keys, rows]."""
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
    weights = tl.where(visible, tl.exp2(scores - lse[None, :]), 0.0)
    d_v = tl.dot(weights.to(d_out.dtype), d_out, d_v, input_precision=PRECISION)
    d_scores = weights * (tl.dot(v, tl.trans(d_out), input_precision=PRECISION) - delta[None, :])
    d_k = tl.dot(d_scores.to(q.dtype), q, d_k, input_precision=PRECISION)
    return d_k, d_v


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
    CODES,
    BOUNDS,
    SINK_BOUNDS,
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
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of BLOCK_N keys and values of one KV head; the first blocks, seen by most rows, start
    first.
    """
    pid = tl.program_id(0)
    which = pid % lists
    key_block = pid // lists
    item = which // kv_heads
    kv_head = which % kv_heads
    item64, kv_head64 = item.to(tl.int64), kv_head.to(tl.int64)
    key_begin = key_block * BLOCK_N
    key = key_begin + tl.arange(0, BLOCK_N)
    key_ok = key < num_keys
    key64 = key.to(tl.int64)
    k = load_tile(K + item64 * stride_kb + kv_head64 * stride_kh, key64, stride_kt, key_ok, D, BLOCK_D)
    v = load_tile(V + item64 * stride_vb + kv_head64 * stride_vh, key64, stride_vt, key_ok, D, BLOCK_D)
    d_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    d_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    q_base = Q + item64 * stride_qb
    offset = tl.load(OFFSET + item)

    # Here-rows: those whose window can reach these keys, then with sinks all later ones.
    row_begin = tl.maximum(key_begin - offset, 0)
    row_end = tl.minimum(key_begin + BLOCK_N - 1 + window - offset, num_queries)
    if SINKS > 0:
        key_blocks = (num_keys + BLOCK_N - 1) // BLOCK_N
        row_end = tl.maximum(row_end, tl.load(SINK_BOUNDS + item * key_blocks + key_block))
    for start in range(row_begin * GROUP, row_end * GROUP, BLOCK_M):
        code = start + tl.arange(0, BLOCK_M)
        query = code // GROUP
        head64 = (kv_head * GROUP + code % GROUP).to(tl.int64)
        query64 = query.to(tl.int64)
        ok = query < num_queries
        place = (item64 * num_queries + query64) * (kv_heads * GROUP) + head64
        listed = tl.load(LISTED + place, mask=ok, other=1) != 0
        first = tl.load(FIRST + item * num_queries + query, mask=ok, other=num_keys)
        stop = tl.load(STOP + item * num_queries + query, mask=ok, other=0)
        near = tl.maximum(first, offset + query - window + 1)
        inside = key[:, None] >= near[None, :]
        if SINKS > 0:
            inside = inside | ((key[:, None] >= first[None, :]) & (key[:, None] < first[None, :] + SINKS))
        visible = inside & (key[:, None] < stop[None, :]) & (listed == 0)[None, :]
        q = load_tile(q_base, query64 * stride_qt + head64 * stride_qh, 1, ok, D, BLOCK_D)
        d_out = load_tile(D_OUT, place * D, 1, ok, D, BLOCK_D)
        lse = tl.load(LSE + place, mask=ok, other=0.0)
        lse = tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
        delta = tl.load(DELTA + place, mask=ok, other=0.0)
        d_k, d_v = key_step(k, v, q, d_out, lse, delta, visible, d_k, d_v, scale, PRECISION)

    # All-rows: the part of the sorted list that sees these keys.
    bounds = BOUNDS + (which * ((num_keys + BLOCK_N - 1) // BLOCK_N) + key_block) * 2
    list_begin = tl.load(bounds)
    list_end = tl.load(bounds + 1)
    for start in range(list_begin, list_end, BLOCK_M):
        place_in_list = start + tl.arange(0, BLOCK_M)
        ok = place_in_list < list_end
        code = tl.load(CODES + which.to(tl.int64) * num_queries * GROUP + place_in_list, mask=ok, other=0)
        query = code // GROUP
        head64 = (kv_head * GROUP + code % GROUP).to(tl.int64)
        query64 = query.to(tl.int64)
        place = (item64 * num_queries + query64) * (kv_heads * GROUP) + head64
        first = tl.load(FIRST + item * num_queries + query, mask=ok, other=num_keys)
        stop = tl.load(STOP + item * num_queries + query, mask=ok, other=0)
        visible = (key[:, None] >= first[None, :]) & (key[:, None] < stop[None, :])
        q = load_tile(q_base, query64 * stride_qt + head64 * stride_qh, 1, ok, D, BLOCK_D)
        d_out = load_tile(D_OUT, place * D, 1, ok, D, BLOCK_D)
        lse = tl.load(LSE + place, mask=ok, other=0.0) * 1.4426950408889634
        delta = tl.load(DELTA + place, mask=ok, other=0.0)
        d_k, d_v = key_step(k, v, q, d_out, lse, delta, visible, d_k, d_v, scale, PRECISION)

    place = ((item64 * num_keys + key64) * kv_heads + kv_head64) * D
    store_tile(D_K, place, 1, key_ok, d_k * softmax_scale, D, BLOCK_D)
    store_tile(D_V, place, 1, key_ok, d_v, D, BLOCK_D)
