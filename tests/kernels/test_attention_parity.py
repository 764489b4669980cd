"""The torch path against the float64 definition: forward and all gradients, random shapes and options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from tests.kernels.helpers import (
    NAMES,
    Call,
    assert_close,
    calls,
    make_call,
    run,
    run_reference,
    shortest_banded,
)

CALLS = calls([(k, g) for k in (1, 2, 4) for g in (1, 2)], [8, 16, 64], longest=300, most_rows=2400)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(CALLS)
def test_bands_and_far_rows_equal_the_definition(options: dict[str, Any]) -> None:
    call = make_call(**options)
    with shortest_banded(0):
        assert_close(run(call), run_reference(call), torch.float32)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(CALLS)
def test_the_dense_path_of_short_segments_equals_the_definition(options: dict[str, Any]) -> None:
    call = make_call(**options)
    with shortest_banded(10**9):
        assert_close(run(call), run_reference(call), torch.float32)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(CALLS)
def test_the_masked_calls_of_moderate_segments_equal_the_definition(options: dict[str, Any]) -> None:
    call = make_call(**options)
    assert_close(run(call), run_reference(call), torch.float32)


@pytest.mark.parametrize("heads_at_once", [1, 3])
@pytest.mark.parametrize("usage", [0.3, 0.9])
def test_few_heads_of_a_group_at_a_time_equal_the_definition(
    heads_at_once: int, usage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aha_kernels.torch_path.ROWS_AT_ONCE", heads_at_once * 250)
    call = make_call(queries=250, heads=8, kv_heads=2, window=20, usage=usage)
    with shortest_banded(0):
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


@pytest.mark.parametrize(("scores", "rows"), [(0, 16384), (0, 200), (10**9, 16384)])
def test_scores_of_extreme_range_keep_their_gradients(
    scores: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aha_kernels.torch_path.ROWS_AT_ONCE", rows)
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
