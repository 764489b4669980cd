"""Triton kernels of the forward pass: a window pass over all rows, then a pass over the compacted all-rows.

The second pass sees *all* keys of its rows and overwrites the first one's output: no merge, and at usual
windows a tenth of a percent more work. The same kernel probes here-rows for their router gradient in the
backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(base, rows, stride, rows_ok, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns [rows, BLOCK_D] from base + rows * stride, zero where not ok; rows int64."""
    dims = tl.arange(0, BLOCK_D)
    mask = rows_ok[:, None]
    if BLOCK_D != D:
        mask = mask & (dims < D)[None, :]
    return tl.load(base + rows[:, None] * stride + dims[None, :], mask=mask, other=0.0)


@triton.jit
def load_keys(base, start, stride, num_keys, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns rows start .. start + BLOCK_N - 1 of a [keys, D] matrix, zero beyond num_keys.

    The 64-bit part of the address is one number: offsets within the tile take half the registers.
    """
    rows = tl.arange(0, BLOCK_N)
    return load_tile(
        base + tl.cast(start, tl.int64) * stride, rows, stride, start + rows < num_keys, D, BLOCK_D
    )


@triton.jit
def store_tile(base, rows, stride, rows_ok, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes value [rows, BLOCK_D] to base + rows * stride where ok."""
    dims = tl.arange(0, BLOCK_D)
    mask = rows_ok[:, None] & (dims < D)[None, :]
    tl.store(base + rows[:, None] * stride + dims[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def softmax_step(
    q,
    acc,
    peak,
    total,
    k_base,
    v_base,
    start,
    num_keys,
    stride_k,
    stride_v,
    visible,
    scale,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds one block of keys to the running (acc, peak, total) of an online softmax in base 2."""
    k = load_keys(k_base, start, stride_k, num_keys, BLOCK_N, D, BLOCK_D)
    v = load_keys(v_base, start, stride_v, num_keys, BLOCK_N, D, BLOCK_D)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - safe_peak[:, None])
    shrink = tl.exp2(peak - safe_peak)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_peak, total


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
    query = code // GROUP
    head = kv_head * GROUP + code % GROUP
    ok = query < num_queries
    first = tl.load(FIRST + item * num_queries + query, mask=ok, other=num_keys)
    stop = tl.load(STOP + item * num_queries + query, mask=ok, other=0)
    position = tl.load(OFFSET + item) + query
    near = tl.maximum(first, position - window + 1)

    item64, head64, query64 = item.to(tl.int64), head.to(tl.int64), query.to(tl.int64)
    row = query64 * stride_qt + head64 * stride_qh
    q = load_tile(Q + item64 * stride_qb, row, 1, ok, D, BLOCK_D)
    k_base = K + item64 * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = V + item64 * stride_vb + kv_head.to(tl.int64) * stride_vh

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    begin = tl.min(tl.where(stop > near, near, num_keys)) // BLOCK_N * BLOCK_N
    end = tl.max(stop)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        visible = (key[None, :] >= near[:, None]) & (key[None, :] < stop[:, None])
        if SINKS > 0:
            sink = (key[None, :] >= first[:, None]) & (key[None, :] < first[:, None] + SINKS)
            visible = visible | (sink & (key[None, :] < stop[:, None]))
        acc, peak, total = softmax_step(
            q, acc, peak, total, k_base, v_base, start, num_keys, stride_kt, stride_vt, visible, scale,
            True, BLOCK_N, D, BLOCK_D, PRECISION,
        )  # fmt: skip
    if SINKS > 0:
        # Sinks before the block's windows: those of the earliest document, as a later one starts within the
        # block.
        sink_begin = tl.min(first)
        for start in range(sink_begin, tl.minimum(sink_begin + SINKS, begin), BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            visible = (key[None, :] >= first[:, None]) & (key[None, :] < first[:, None] + SINKS)
            visible = visible & (key[None, :] < stop[:, None]) & (key[None, :] < begin)
            acc, peak, total = softmax_step(
                q, acc, peak, total, k_base, v_base, start, num_keys, stride_kt, stride_vt, visible, scale,
                True, BLOCK_N, D, BLOCK_D, PRECISION,
            )  # fmt: skip
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    # log2 to natural logarithm
    lse = tl.where(some, (peak + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
    place = (item64 * num_queries + query64) * (kv_heads * GROUP) + head64
    store_tile(OUT, place * D, 1, ok, acc / divisor[:, None], D, BLOCK_D)
    tl.store(LSE + place, lse, mask=ok)
    tl.store(LSE_HERE + place, lse, mask=ok)


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
    CODES,
    COUNTS,
    FIRST,
    STOP,
    OFFSET,
    num_queries,
    num_keys,
    kv_heads,
    lists,
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
    """*All* attention of the listed rows, overwriting OUT and LSE; every list's longest block first.

    PROBE: sees far keys only, and writes ``weight * <dO, O_all - O_here>`` to D_ROUTE instead.
    """
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
    if PROBE:
        position = tl.load(OFFSET + item) + query
        first = first + sinks
        stop = tl.minimum(stop, position - window + 1)

    item64, head64, query64 = item.to(tl.int64), head.to(tl.int64), query.to(tl.int64)
    row = query64 * stride_qt + head64 * stride_qh
    q = load_tile(Q + item64 * stride_qb, row, 1, ok, D, BLOCK_D)
    k_base = K + item64 * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = V + item64 * stride_vb + kv_head.to(tl.int64) * stride_vh

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    begin = tl.min(tl.where(ok, first, num_keys)) // BLOCK_N * BLOCK_N
    end = tl.max(tl.where(ok, stop, 0))
    # Keys that every row sees need no mask: from whole_begin to whole_end.
    whole_begin = tl.minimum((tl.max(tl.where(ok, first, 0)) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
    whole_end = tl.maximum(tl.min(tl.where(ok, stop, num_keys)) // BLOCK_N * BLOCK_N, whole_begin)
    whole_end = tl.where(whole_begin < end, whole_end, end)
    for start in range(whole_begin, whole_end, BLOCK_N):
        acc, peak, total = softmax_step(
            q, acc, peak, total, k_base, v_base, start, num_keys, stride_kt, stride_vt, start, scale,
            False, BLOCK_N, D, BLOCK_D, PRECISION,
        )  # fmt: skip
    before = (whole_begin - begin + BLOCK_N - 1) // BLOCK_N
    after = (end - whole_end + BLOCK_N - 1) // BLOCK_N
    for i in range(0, before + after):
        start = tl.where(i < before, begin + i * BLOCK_N, whole_end + (i - before) * BLOCK_N)
        key = start + tl.arange(0, BLOCK_N)
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        acc, peak, total = softmax_step(
            q, acc, peak, total, k_base, v_base, start, num_keys, stride_kt, stride_vt, visible, scale,
            True, BLOCK_N, D, BLOCK_D, PRECISION,
        )  # fmt: skip
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    lse = tl.where(some, (peak + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
    out = acc / divisor[:, None]
    place = (item64 * num_queries + query64) * (kv_heads * GROUP) + head64
    if PROBE:
        d_out = load_tile(D_OUT, place * D, 1, ok, D, BLOCK_D).to(tl.float32)
        # O_all - O_here = share * (O_far - O_here), where share is the weight of the far keys
        share = tl.where(some, 1.0 / (1.0 + tl.exp(tl.load(LSE_HERE + place) - lse)), 0.0)
        value = share * (tl.sum(d_out * out, 1) - tl.load(DELTA + place))
        tl.store(D_ROUTE + place, value * weight, mask=ok)
    else:
        store_tile(OUT, place * D, 1, ok, out, D, BLOCK_D)
        tl.store(LSE + place, lse, mask=ok)
