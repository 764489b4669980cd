"""The torch path against the float64 definition: forward and all gradients, random shapes and options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.helpers import NAMES, Call, assert_close, make_call, run, run_reference, shortest_banded


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    batch = draw(st.integers(1, 3))
    queries = draw(st.integers(1, 300))
    options: dict[str, Any] = {
        "batch": batch,
        "queries": queries,
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.sampled_from([1, 2])),
        "head_dim": draw(st.sampled_from([8, 16, 64])),
        "window": draw(st.sampled_from([1, 2, 7, 16, 33, 100, 400])),
        "usage": draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        "seed": draw(st.integers(0, 10_000)),
        "strided": draw(st.booleans()),
        "num_sink_tokens": draw(st.sampled_from([0, 0, 1, 5])),
    }
    kind = draw(st.sampled_from(["plain", "documents", "offset", "padding"]))
    if kind == "documents":
        borders = sorted(draw(st.lists(st.integers(0, queries), max_size=5)))
        options.update(batch=1, cu_seqlens=torch.tensor([0, *borders, queries], dtype=torch.int32))
    elif kind == "offset":
        offset = draw(st.integers(0, 60))
        options.update(query_offset=offset, keys=queries + offset)
    elif kind == "padding":
        starts = [draw(st.integers(0, queries)) for _ in range(batch)]
        ends = [draw(st.integers(0, queries)) for _ in range(batch)]
        options.update(key_start=torch.tensor(starts), key_end=torch.tensor(ends))
    return options


@settings(max_examples=60, deadline=None, derandomize=True)
@given(calls())
def test_bands_and_far_rows_equal_the_definition(options: dict[str, Any]) -> None:
    call = make_call(**options)
    with shortest_banded(0):
        assert_close(run(call), run_reference(call), torch.float32)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(calls())
def test_the_dense_path_of_short_segments_equals_the_definition(options: dict[str, Any]) -> None:
    call = make_call(**options)
    with shortest_banded(10**9):
        assert_close(run(call), run_reference(call), torch.float32)


@pytest.mark.parametrize("scores", [0, 10**9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_equals_the_definition(dtype: torch.dtype, scores: int) -> None:
    call = make_call(queries=150, window=20, head_dim=32, dtype=dtype)
    with shortest_banded(scores):
        assert_close(run(call), run_reference(call), dtype)


def test_several_tiles_of_far_rows_and_near_bands() -> None:
    call = make_call(queries=1400, heads=2, kv_heads=1, window=130, usage=0.6, num_sink_tokens=3)
    assert_close(run(call), run_reference(call), torch.float32)


@pytest.mark.parametrize("scores", [0, 10**9])
def test_scores_of_extreme_range_keep_their_gradients(scores: int) -> None:
    call = make_call(queries=200, window=20, usage=0.4, spread=150.0, dtype=torch.float64)
    actual = [x.float().requires_grad_() for x in (y.detach() for y in call.leaves())]
    call32 = Call(*actual, call.window)
    with shortest_banded(scores):
        ours = run(call32)
    truth = run_reference(call32)
    for name, x, y in zip(NAMES, ours, truth, strict=True):
        error = (x.double() - y).norm() / y.norm().clamp_min(1e-3)
        assert error < 1e-3, f"{name}: {error:.1e}"  # scores of 1000 carry fp32 rounding of 1e-4


@pytest.mark.parametrize("usage", [0.0, 0.2, 1.0])
def test_two_backward_passes_are_bit_equal_on_any_number_of_threads(usage: float) -> None:
    call = make_call(queries=700, heads=4, kv_heads=2, window=40, usage=usage)
    first = run(call)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        second = run(call)
    finally:
        torch.set_num_threads(threads)
    for name, x, y in zip(NAMES, first, second, strict=True):
        assert torch.equal(x, y), name
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("options", [{}, {"num_sink_tokens": 2, "query_offset": 20, "keys": 80}])
def test_the_reference_backend_is_the_definition(options: dict[str, Any]) -> None:
    call = make_call(queries=60, **options)
    assert_close(run(call, backend="reference"), run_reference(call), torch.float32)


def test_the_reference_backend_samples_the_same_router_gradients() -> None:
    call = make_call(queries=60, router_grad="sampled:0.3", router_seed=5)
    ours, blended = run(call), run(call, backend="reference")
    for name, x, y in zip(NAMES, ours, blended, strict=True):
        assert torch.allclose(x, y, atol=1e-5), name
