"""Numerics of the Triton kernels under Triton's interpreter; run by test_triton_interpreter in its own
process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from aha_kernels import InputError, aha_attention, aha_decode
from tests.kernels import interpreter_repairs
from tests.kernels.helpers import assert_close, calls, in_chunks, make_call, run, run_reference, seen
from tests.kernels.test_decode import paged

interpreter_repairs.repair_bf16()
interpreter_repairs.repair_loop_bounds()
DOCUMENTS = torch.tensor([0, 0, 1, 30, 77], dtype=torch.int32)
CASES: dict[str, dict[str, Any]] = {
    "grouped heads, strided": {"queries": 100, "heads": 4, "kv_heads": 2, "window": 17, "strided": True},
    "documents and sinks": {
        "queries": 77,
        "window": 9,
        "usage": 0.4,
        "num_sink_tokens": 3,
        "cu_seqlens": DOCUMENTS,
    },
    "empty and one-token documents": {
        "queries": 32,
        "window": 4,
        "usage": 0.5,
        "cu_seqlens": torch.tensor([0, 0, 1, 1, 32], dtype=torch.int32),
    },
    # Its later rows must not see the keys that all rows of the document before see.
    "a block of rows across documents": {
        "queries": 150,
        "heads": 1,
        "kv_heads": 1,
        "window": 9,
        "usage": 1.0,
        "cu_seqlens": torch.tensor([0, 100, 150], dtype=torch.int32),
    },
    "padding on both sides": {
        "batch": 3,
        "queries": 40,
        "window": 6,
        "usage": 0.5,
        "num_sink_tokens": 2,
        "key_start": torch.tensor([5, 0, 40]),
        "key_end": torch.tensor([40, 12, 40]),
    },
    "a chunk behind a cache": {"queries": 20, "keys": 90, "window": 33, "query_offset": 70, "usage": 0.5},
    "all open": {"queries": 70, "heads": 2, "kv_heads": 2, "window": 16, "usage": 1.0},
    "all closed": {"queries": 70, "heads": 2, "kv_heads": 1, "window": 16, "usage": 0.0},
    "window beyond the sequence": {"queries": 33, "heads": 2, "kv_heads": 1, "window": 500},
    "one token, window 1": {"queries": 1, "window": 1},
    "head_dim 96": {"queries": 40, "heads": 2, "kv_heads": 1, "head_dim": 96, "window": 8, "usage": 0.5},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_kernels_equal_the_definition(options: dict[str, Any]) -> None:
    call = make_call(**({"head_dim": 64} | options))
    assert_close(run(call, backend="triton"), run_reference(call), torch.float32)


@pytest.mark.parametrize("window", [1, 2, 8, 31, 32, 33])
def test_a_here_token_sees_exactly_its_window(window: int) -> None:
    expected = [[max(0, t - window + 1) <= j <= t for j in range(32)] for t in range(32)]
    assert seen(0.0, window, 32, backend="triton").tolist() == expected


def test_an_all_token_sees_every_key_before_it() -> None:
    assert torch.equal(seen(1.0, 3, 32, backend="triton"), torch.ones(32, 32).tril().bool())


@pytest.mark.parametrize("length", [1, 7, 33, 257])
@pytest.mark.parametrize("window", [1, 10, 500])
def test_lengths_and_windows_that_divide_nothing(length: int, window: int) -> None:
    call = make_call(queries=length, window=window, heads=1, kv_heads=1, head_dim=64, usage=0.2)
    assert_close(run(call, backend="triton"), run_reference(call), torch.float32)


def test_rows_that_see_nothing_are_zero_and_give_no_gradient() -> None:
    start, end = torch.tensor([5, 20, 0]), torch.tensor([20, 20, 3])
    options = {"key_start": start, "key_end": end, "head_dim": 64}
    call = make_call(batch=3, queries=20, window=4, usage=0.5, **options)  # type: ignore[arg-type]
    out, dq, dk, dv, droute = run(call, backend="triton")
    assert_close((out, dq, dk, dv, droute), run_reference(call), torch.float32)
    assert not out[0, :5].any() and not out[1].any()
    assert not dq[0, :5].any() and not dk[1].any() and not droute[1].any()
    assert not dk[2, 3:].any() and not dv[2, 3:].any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 32}, "head_dim is 32, not one of 64, 96, 128, 256"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_what_the_kernels_cannot_compute_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"backend='triton' cannot compute this call: .*{words}"):
        run(make_call(**({"head_dim": 64} | changes)), backend="triton")


@pytest.mark.parametrize(
    ("chunks", "usage"), [([20, 12], 0.0), ([20, 12], 0.5), ([20, 12], 1.0), ([1] * 32, 0.5)]
)
def test_chunks_equal_one_pass(chunks: list[int], usage: float) -> None:
    call = make_call(queries=32, window=8, usage=usage, head_dim=64)
    with torch.no_grad():
        whole = aha_attention(*call.leaves(), 8, backend="torch")
        assert torch.allclose(in_chunks(call, chunks, backend="triton"), whole, atol=1e-5)


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, sinks: int) -> None:
    call = make_call(
        queries=60, heads=2, kv_heads=1, head_dim=64, window=12, dtype=dtype, num_sink_tokens=sinks
    )
    assert_close(run(call, backend="triton"), run_reference(call), dtype)


def test_the_interpreter_rounds_to_bf16_as_torch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (10_000,), generator=generator, dtype=torch.int32)
    ties = (bits & -65536) | 0x8000  # half-way between two bf16 numbers
    values = torch.cat([bits, ties]).view(torch.float32)
    values = torch.cat([values[torch.isfinite(values)], torch.tensor([0.0, -0.0, float("inf"), 3.4e38])])
    ours = torch.from_numpy(interpreter_repairs.to_patterns(values.numpy()).astype(np.int16))
    assert torch.equal(ours, values.bfloat16().view(torch.int16))
    assert np.array_equal(
        interpreter_repairs.to_float(ours.numpy().view(np.uint16)), values.bfloat16().float()
    )


HEADS = [(1, 1), (1, 3), (1, 8), (2, 1), (2, 2), (2, 4), (3, 2), (8, 1)]
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(calls(HEADS, [64, 96], longest=150, most_rows=150, dtypes=DTYPES))
def test_random_shapes_equal_the_definition_and_repeat_bit_for_bit(options: dict[str, Any]) -> None:
    call = make_call(**options)
    first, second = run(call, backend="triton"), run(call, backend="triton")
    assert_close(first, run_reference(call), options["dtype"])
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_sampled_router_gradients_equal_the_torch_path() -> None:
    call = make_call(
        queries=60, heads=2, kv_heads=1, head_dim=64, window=8, router_grad="sampled:0.3", layer=2
    )
    ours, torch_path = run(call, backend="triton"), run(call, backend="torch")
    assert torch.equal(ours[4] != 0, torch_path[4] != 0)
    assert torch.allclose(ours[4], torch_path[4], atol=1e-5)


def test_a_key_outside_the_window_changes_nothing() -> None:
    call = make_call(queries=60, heads=2, kv_heads=1, head_dim=64, window=8, usage=0.0)
    with torch.no_grad():
        before = aha_attention(*call.leaves(), 8, backend="triton")
        call.k[:, 10] += 100.0
        after = aha_attention(*call.leaves(), 8, backend="triton")
    assert (before != after).any(-1).any(-1)[0].nonzero()[:, 0].tolist() == list(range(10, 18))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("sinks", [0, 3])
def test_decode_equals_the_torch_path(page_size: int | None, sinks: int) -> None:
    call = make_call(batch=3, queries=2, keys=1040, window=10, usage=0.4, heads=4, kv_heads=2, head_dim=64)
    q, k, v, route = (x.detach() for x in call.leaves())
    lengths, starts = torch.tensor([1040, 600, 7]), torch.tensor([0, 5, 2])
    options = {"key_start": starts, "num_sink_tokens": sinks}
    truth = aha_decode(q, k, v, route, 10, lengths, backend="torch", **options)  # type: ignore[arg-type]
    table = None
    if page_size is not None:
        (k, table), (v, _) = paged(k, page_size), paged(v, page_size)
    out = aha_decode(q, k, v, route, 10, lengths, table, backend="triton", **options)  # type: ignore[arg-type]
    assert torch.allclose(out, truth, atol=1e-5)
