"""The torch path against the float64 definition: forward and all gradients, over random shapes and options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.helpers import assert_close, make_call, run, run_reference


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
def test_torch_path_equals_the_definition(options: dict[str, Any]) -> None:
    call = make_call(**options)
    assert_close(run(call), run_reference(call), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_equals_the_definition(dtype: torch.dtype) -> None:
    call = make_call(queries=150, window=20, head_dim=32, dtype=dtype)
    assert_close(run(call), run_reference(call), dtype)
