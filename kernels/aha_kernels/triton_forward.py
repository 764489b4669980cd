"""Triton kernels of the forward pass: a window pass over all rows, then a pass over the compacted all-rows.

The second pass sees *all* keys of its rows and overwrites the first one's output: no merge, and at usual
windows a tenth of a percent more work. The same kernel probes here-rows for their router gradient in the
backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aha_kernels.triton_steps import (
    finish_softmax,
    here_block,
    here_blocks,
    key_range,
    list_codes,
    load_keys,
    load_tile,
    locate_rows,
    softmax_step,
    store_tile,
)


@triton.jit
def near_forward_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    LSE_HERE,
    FIRST,
    STOP,
    OFFSET,
    num_queries,
    num_keys,
    kv_heads,
    lists,
    window,
    scale,
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
    """*Here* attention of every row: one program per BLOCK_M interleaved rows of a (batch item, KV head)."""
    pid = tl.program_id(0)
    item = (pid % lists) // kv_heads
    kv_head = pid % kv_heads
    code = (pid // lists) * BLOCK_M + tl.arange(0, BLOCK_M)
    query, place, q_row = locate_rows(code, item, kv_head, num_queries, kv_heads, stride_qt, stride_qh, GROUP)
    ok = query < num_queries
    first, stop = key_range(FIRST, STOP, item, query, num_queries, num_keys, ok)
    near = tl.maximum(first, tl.load(OFFSET + item) + query - window + 1)

    item64, kv_head64 = item.to(tl.int64), kv_head.to(tl.int64)
    q = load_tile(Q + item64 * stride_qb, q_row, 1, ok, D, BLOCK_D)
    k_base = K + item64 * stride_kb + kv_head64 * stride_kh
    v_base = V + item64 * stride_vb + kv_head64 * stride_vh
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    near_begin, sink_begin, sink_blocks, blocks = here_blocks(first, near, stop, num_keys, SINKS, BLOCK_N)
    for i in range(0, blocks):
        start, visible = here_block(
            i, first, near, stop, num_keys, near_begin, sink_begin, sink_blocks, SINKS, BLOCK_N
        )
        k = load_keys(k_base, start, stride_kt, num_keys, BLOCK_N, D, BLOCK_D)
        v = load_keys(v_base, start, stride_vt, num_keys, BLOCK_N, D, BLOCK_D)
        acc, peak, total = softmax_step(q, k, v, acc, peak, total, visible, scale, True, PRECISION)
    out, lse = finish_softmax(acc, peak, total)
    store_tile(OUT, place * D, 1, ok, out, D, BLOCK_D)
    tl.store(LSE + place, lse * 0.6931471805599453, mask=ok)  # to the natural logarithm
    tl.store(LSE_HERE + place, lse * 0.6931471805599453, mask=ok)


@triton.jit
def rows_forward_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    D_OUT,
    DELTA,
    LSE_HERE,
    D_ROUTE,
    WORK,
    CODES,
    COUNTS,
    FIRST,
    STOP,
    OFFSET,
    num_queries,
    num_keys,
    kv_heads,
    blocks,
    window,
    sinks,
    scale,
    weight,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    PROBE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """*All* attention of the listed rows, overwriting OUT and LSE; WORK names block after block, longest
    first.

    PROBE: sees far keys only, and writes ``weight * <dO, O_all - O_here>`` to D_ROUTE instead.
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
    if PROBE:
        first = first + sinks
        stop = tl.minimum(stop, tl.load(OFFSET + item) + query - window + 1)

    item64, kv_head64 = item.to(tl.int64), kv_head.to(tl.int64)
    q = load_tile(Q + item64 * stride_qb, q_row, 1, ok, D, BLOCK_D)
    k_base = K + item64 * stride_kb + kv_head64 * stride_kh
    v_base = V + item64 * stride_vb + kv_head64 * stride_vh
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    begin = tl.min(first) // BLOCK_N * BLOCK_N
    end = tl.max(stop)
    # Keys that every row sees need no mask: from whole_begin to whole_end.
    whole_begin = tl.minimum((tl.max(tl.where(ok, first, 0)) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
    whole_end = tl.maximum(tl.min(tl.where(ok, stop, num_keys)) // BLOCK_N * BLOCK_N, whole_begin)
    # Changes no value, but without it ptxas takes nine registers more on sm_90 and spills at head_dim 96.
    whole_end = tl.where(whole_begin < end, whole_end, end)
    for start in range(whole_begin, whole_end, BLOCK_N):
        k = load_keys(k_base, start, stride_kt, num_keys, BLOCK_N, D, BLOCK_D)
        v = load_keys(v_base, start, stride_vt, num_keys, BLOCK_N, D, BLOCK_D)
        acc, peak, total = softmax_step(q, k, v, acc, peak, total, start, scale, False, PRECISION)
    before = (whole_begin - begin + BLOCK_N - 1) // BLOCK_N
    after = (end - whole_end + BLOCK_N - 1) // BLOCK_N
    for i in range(0, before + after):
        start = tl.where(i < before, begin + i * BLOCK_N, whole_end + (i - before) * BLOCK_N)
        key = start + tl.arange(0, BLOCK_N)
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        k = load_keys(k_base, start, stride_kt, num_keys, BLOCK_N, D, BLOCK_D)
        v = load_keys(v_base, start, stride_vt, num_keys, BLOCK_N, D, BLOCK_D)
        acc, peak, total = softmax_step(q, k, v, acc, peak, total, visible, scale, True, PRECISION)
    out, lse = finish_softmax(acc, peak, total)
    lse = lse * 0.6931471805599453  # to the natural logarithm
    if PROBE:
        d_out = load_tile(D_OUT, place * D, 1, ok, D, BLOCK_D).to(tl.float32)
        # O_all - O_here = share * (O_far - O_here), where share is the weight of the far keys
        share = 1.0 / (1.0 + tl.exp(tl.load(LSE_HERE + place, mask=ok, other=0.0) - lse))
        value = share * (tl.sum(d_out * out, 1) - tl.load(DELTA + place, mask=ok, other=0.0))
        tl.store(D_ROUTE + place, value * weight, mask=ok)
    else:
        store_tile(OUT, place * D, 1, ok, out, D, BLOCK_D)
        tl.store(LSE + place, lse, mask=ok)
