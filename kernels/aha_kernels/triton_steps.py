"""Device functions that the Triton kernels share: finding rows, loading tiles, masks, softmax and its
gradient.

Shapes in brackets are those of tiles. Rows of a KV group are interleaved: ``code = query * GROUP + head in
group``. Softmax runs in base 2: scores arrive multiplied by log2(e).
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
def locate_rows(
    code, item, kv_head, num_queries, kv_heads, stride_t, stride_h, GROUP: tl.constexpr
):  # fmt: skip
    """Returns, for interleaved rows: their queries (int32), their places in a contiguous [batch, queries,
    heads] tensor and their offsets within their item of q (int64).
    """
    query = code // GROUP
    query64 = query.to(tl.int64)
    head64 = (kv_head * GROUP + code % GROUP).to(tl.int64)
    place = (item.to(tl.int64) * num_queries + query64) * (kv_heads * GROUP) + head64
    return query, place, query64 * stride_t + head64 * stride_h


@triton.jit
def list_codes(CODES, which, size, begin, end, BLOCK_M: tl.constexpr):
    """Returns codes begin .. begin + BLOCK_M - 1 of a row list, 0 from end on, and which of them hold."""
    number = begin + tl.arange(0, BLOCK_M)
    ok = number < end
    return tl.load(CODES + which.to(tl.int64) * size + number, mask=ok, other=0), ok


@triton.jit
def key_range(FIRST, STOP, item, query, num_queries, num_keys, ok):
    """Returns the first key of each query and one past its last: an empty range where not ok."""
    place = item * num_queries + query
    first = tl.load(FIRST + place, mask=ok, other=num_keys)
    return first, tl.load(STOP + place, mask=ok, other=0)


@triton.jit
def here_blocks(first, near, stop, num_keys, SINKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the key blocks that windows and sinks of rows need: (near_begin, sink_begin, sink_blocks,
    blocks).

    The sinks before near_begin are those of the rows' earliest document: a later one starts within the rows.
    """
    near_begin = tl.min(tl.where(stop > near, near, num_keys)) // BLOCK_N * BLOCK_N
    near_blocks = tl.maximum(tl.max(stop) - near_begin + BLOCK_N - 1, 0) // BLOCK_N
    sink_begin = tl.min(first)
    sink_keys = tl.maximum(tl.minimum(sink_begin + SINKS, near_begin) - sink_begin, 0)
    sink_blocks = (sink_keys + BLOCK_N - 1) // BLOCK_N
    return near_begin, sink_begin, sink_blocks, sink_blocks + near_blocks


@triton.jit
def here_block(
    i, first, near, stop, num_keys, near_begin, sink_begin, sink_blocks, SINKS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Returns the first key of block i of here_blocks and which of its keys the rows see [rows, BLOCK_N]."""
    keys = tl.arange(0, BLOCK_N)
    if SINKS == 0:
        start = near_begin + i * BLOCK_N
        key = start + keys
        visible = (key[None, :] >= near[:, None]) & (key[None, :] < stop[:, None])
    else:
        in_sinks = i < sink_blocks
        start = tl.where(in_sinks, sink_begin + i * BLOCK_N, near_begin + (i - sink_blocks) * BLOCK_N)
        key = start + keys
        # Sinks from near_begin on belong to the near blocks: in a sink block they become a key that none sees.
        key = tl.where(key < tl.where(in_sinks, near_begin, num_keys), key, num_keys)
        sink = (key[None, :] >= first[:, None]) & (key[None, :] < first[:, None] + SINKS)
        visible = (sink | (key[None, :] >= near[:, None])) & (key[None, :] < stop[:, None])
    return start, visible


@triton.jit
def raise_peak(peak, other):
    """Returns the larger peak, the same with 0 for -inf, and the factor that carries sums over to it."""
    new_peak = tl.maximum(peak, other)
    safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf - -inf is NaN
    return new_peak, safe_peak, tl.exp2(peak - safe_peak)


@triton.jit
def softmax_step(
    q, k, v, acc, peak, total, visible, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Adds one block of keys to the running (acc, peak, total) of an online softmax."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    peak, safe_peak, shrink = raise_peak(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - safe_peak[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, peak, total


@triton.jit
def finish_softmax(acc, peak, total):
    """Returns the output [rows, BLOCK_D] and its log-sum-exp in base 2; rows without keys: 0 and -inf."""
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    return acc / divisor[:, None], tl.where(some, peak + tl.log2(divisor), float("-inf"))


@triton.jit
def load_rows(
    q_base, D_OUT, LSE, DELTA, place, q_row, ok, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Returns what the gradient needs of rows: q, d_out, log-sum-exp in base 2 and <dO, O>.

    Rows that see no key have a log-sum-exp of -inf, and infinite weights that no mask lets through.
    """
    q = load_tile(q_base, q_row, 1, ok, D, BLOCK_D)
    d_out = load_tile(D_OUT, place * D, 1, ok, D, BLOCK_D)
    lse = tl.load(LSE + place, mask=ok, other=0.0) * 1.4426950408889634
    return q, d_out, lse, tl.load(DELTA + place, mask=ok, other=0.0)


@triton.jit
def query_step(
    q, d_out, lse, delta, k, v, acc, row_sum, visible, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """Adds one block of keys to the gradient of the queries and to the rows' sums of score gradients."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    weights = tl.where(visible, tl.exp2(scores - lse[:, None]), 0.0)
    d_scores = weights * (tl.dot(d_out, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    row_sum += tl.sum(d_scores, 1)
    acc = tl.dot(d_scores.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc, row_sum


@triton.jit
def key_step(
    k, v, q, d_out, lse, delta, visible, d_k, d_v, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """Adds a block of rows to the gradients of one block of keys and values; visible [keys, rows]."""
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
    weights = tl.where(visible, tl.exp2(scores - lse[None, :]), 0.0)
    d_v = tl.dot(weights.to(d_out.dtype), d_out, d_v, input_precision=PRECISION)
    d_scores = weights * (tl.dot(v, tl.trans(d_out), input_precision=PRECISION) - delta[None, :])
    d_k = tl.dot(d_scores.to(q.dtype), q, d_k, input_precision=PRECISION)
    return d_k, d_v
