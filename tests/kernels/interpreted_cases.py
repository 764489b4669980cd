"""Numerics of the Triton kernels under Triton's interpreter; run by test_triton_interpreter in its own
process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aha_kernels import aha_attention, aha_decode
from tests.kernels import bf16_interpreter
from tests.kernels.helpers import assert_close, make_call, run, run_reference
from tests.kernels.test_decode import paged

bf16_interpreter.repair()
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
    ours = torch.from_numpy(bf16_interpreter.to_patterns(values.numpy()).astype(np.int16))
    assert torch.equal(ours, values.bfloat16().view(torch.int16))
    assert np.array_equal(bf16_interpreter.to_float(ours.numpy().view(np.uint16)), values.bfloat16().float())


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (1, 8), (2, 1), (2, 2), (2, 4), (3, 2), (8, 1)]))
    batch, queries = draw(st.integers(1, 2)), draw(st.integers(1, 150 // (kv_heads * group)))
    options: dict[str, Any] = {
        "batch": batch,
        "queries": queries,
        "kv_heads": kv_heads,
        "heads": kv_heads * group,
        "head_dim": draw(st.sampled_from([64, 96])),
        "window": draw(st.sampled_from([1, 2, 7, 16, 33, 200])),
        "usage": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "seed": draw(st.integers(0, 10_000)),
        "strided": draw(st.booleans()),
        "num_sink_tokens": draw(st.sampled_from([0, 0, 1, 5, 40])),
        "dtype": draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])),
    }
    kind = draw(st.sampled_from(["plain", "documents", "offset", "padding"]))
    if kind == "documents":
        borders = sorted(draw(st.lists(st.integers(0, queries), max_size=5)))
        options.update(batch=1, cu_seqlens=torch.tensor([0, *borders, queries], dtype=torch.int32))
    elif kind == "offset":
        offsets = [draw(st.integers(0, 60)) for _ in range(batch)]
        options.update(query_offset=torch.tensor(offsets), keys=queries + max(offsets))
    elif kind == "padding":
        starts = [draw(st.integers(0, queries)) for _ in range(batch)]
        ends = [draw(st.integers(0, queries)) for _ in range(batch)]
        options.update(key_start=torch.tensor(starts), key_end=torch.tensor(ends))
    return options


@settings(max_examples=12, deadline=None, derandomize=True)
@given(calls())
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
