"""Numerics of the Triton kernels under Triton's interpreter; run by test_triton_interpreter in its own
process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aha_kernels import aha_attention, aha_decode
from tests.kernels.helpers import assert_close, make_call, run, run_reference
from tests.kernels.test_decode import paged

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


def test_half_precision() -> None:
    call = make_call(queries=60, heads=2, kv_heads=1, head_dim=64, window=12, dtype=torch.float16)
    assert_close(run(call, backend="triton"), run_reference(call), torch.float16)


def test_sampled_router_gradients_equal_the_torch_path() -> None:
    call = make_call(
        queries=60, heads=2, kv_heads=1, head_dim=64, window=8, router_grad="sampled:0.3", layer=2
    )
    ours, torch_path = run(call, backend="triton"), run(call, backend="torch")
    assert torch.equal(ours[4] != 0, torch_path[4] != 0)
    assert torch.allclose(ours[4], torch_path[4], atol=1e-5)


def test_two_backward_passes_are_bit_equal() -> None:
    call = make_call(queries=60, heads=2, kv_heads=1, head_dim=64, window=8)
    assert all(
        torch.equal(x, y)
        for x, y in zip(run(call, backend="triton"), run(call, backend="triton"), strict=True)
    )


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
