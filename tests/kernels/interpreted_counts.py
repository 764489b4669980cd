"""Tile counts against the dots that the kernels compute in Triton's interpreter; run by
test_triton_interpreter in its own process.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpreterBuilder

from aha_kernels import aha_attention, aha_decode, triton_decode
from aha_kernels.problem import Problem
from aha_kernels.reference import visible_keys
from aha_kernels.tile_counts import count_tiles
from tests.kernels.helpers import make_call
from tests.kernels.interpreter_repairs import repair_loop_bounds

repair_loop_bounds()
CASES: dict[str, dict[str, Any]] = {
    "plain": {"queries": 130, "window": 20, "usage": 0.1},
    "documents and sinks": {
        "queries": 150,
        "window": 9,
        "usage": 0.2,
        "num_sink_tokens": 3,
        "cu_seqlens": torch.tensor([0, 20, 21, 75, 150], dtype=torch.int32),
    },
    "a chunk behind a cache": {"queries": 30, "keys": 150, "window": 33, "query_offset": 120, "usage": 0.2},
    "padding": {
        "batch": 2,
        "queries": 50,
        "window": 9,
        "num_sink_tokens": 2,
        "key_start": torch.tensor([25, 0]),
        "key_end": torch.tensor([50, 20]),
    },
}


@pytest.fixture
def dots(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the dots of each kernel from here on."""
    counts: Counter[str] = Counter()
    running = [""]
    dot, launch = InterpreterBuilder.create_dot, triton.runtime.interpreter.GridExecutor.__call__

    def counting_dot(self: Any, *arguments: Any, **options: Any) -> Any:
        counts[running[0]] += 1
        return dot(self, *arguments, **options)

    def named_launch(self: Any, *arguments: Any, **options: Any) -> Any:
        running[0] = self.fn.__name__
        return launch(self, *arguments, **options)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counting_dot)
    monkeypatch.setattr(triton.runtime.interpreter.GridExecutor, "__call__", named_launch)
    return counts


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_counts_are_those_of_the_kernels(options: dict[str, Any], dots: Counter[str]) -> None:
    call = make_call(head_dim=64, heads=2, kv_heads=1, **options)
    q, k, v, route = call.leaves()
    out = aha_attention(q, k, v, route.detach(), call.window, backend="triton", **call.options)
    torch.autograd.grad(out.sum(), (q, k, v))  # without the router's, whose probes are no part of the count
    names = ("num_sink_tokens", "query_offset", "key_start", "key_end", "cu_seqlens")
    geometry = {name: call.options[name] for name in names if name in call.options}
    problem = Problem(call.window, 1.0, **geometry)
    counts = count_tiles(call.route.detach(), call.k.shape[1], 1, 64, problem, torch.float32)
    forward, query, key_value = counts["forward"], counts["query"], counts["key_value"]
    assert dots["near_forward_kernel"] == 2 * forward.near
    assert dots["rows_forward_kernel"] == 2 * forward.listed
    assert dots["near_query_kernel"] == 3 * query.near
    assert dots["rows_query_kernel"] == 3 * query.listed
    assert dots["key_value_kernel"] == 4 * (key_value.near + key_value.listed)

    batch, queries, heads = call.route.shape
    everything, here = visible_keys(batch, queries, call.k.shape[1], call.window, **geometry)
    opened = torch.where(call.route[..., None] != 0, everything[:, :, None], here[:, :, None])
    assert forward.needed == int(opened.sum())


def test_decoding_computes_what_the_routes_open(dots: Counter[str]) -> None:
    call = make_call(queries=1, keys=640, window=50, usage=0.0, heads=4, kv_heads=4, head_dim=64)
    q, k, v, route = (x.detach() for x in call.leaves())
    tiles = {}
    for opened in (0, 1, 3):
        route[...] = 0.0
        route[0, 0, :opened] = 1.0
        dots.clear()
        aha_decode(q, k, v, route, 50, torch.tensor([640]), backend="triton")
        tiles[opened] = dots["decode_split_kernel"] // 2
    whole = 640 // 32  # tiles of a whole cache
    assert tiles == {0: 4 * 2, 1: 3 * 2 + whole, 3: 1 * 2 + 3 * whole}  # a window of 50 takes two tiles


def test_no_program_of_decoding_has_more_than_a_split(
    dots: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[int] = []
    place = InterpreterBuilder.set_grid_idx

    def next_program(self: Any, *index: int) -> None:
        programs.append(dots["decode_split_kernel"])
        place(self, *index)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", next_program)
    call = make_call(queries=1, keys=1300, window=50, usage=0.0, heads=4, kv_heads=4, head_dim=64)
    q, k, v, route = (x.detach() for x in call.leaves())
    route[0, 0, 3] = 1.0  # the open head is the last of the list
    aha_decode(q, k, v, route, 50, torch.tensor([1300]), backend="triton")
    done = [after - before for before, after in zip(programs, programs[1:], strict=False)]
    work = [tiles // 2 for tiles in done if tiles]
    full = triton_decode.KEYS_PER_SPLIT // 32
    assert work[:2] == [full] * 2  # full splits of the open head come first
    assert sorted(work[2:]) == [2, 2, 2, (1300 - 2 * triton_decode.KEYS_PER_SPLIT + 31) // 32]
