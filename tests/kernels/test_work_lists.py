"""The work lists of the Triton kernels, which plain torch builds: nothing left out, largest first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aha_kernels.problem import Problem
from aha_kernels.reference import visible_keys
from aha_kernels.tile_counts import count_tiles, needed_scores
from aha_kernels.triton_geometry import (
    decode_work,
    list_rows,
    list_spans,
    make_geometry,
    make_row_list,
    near_rows,
    span_tiles,
    work_list,
)
from tests.kernels.helpers import geometries

HEADS, KV_HEADS, GROUP = 6, 2, 3


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, int, dict[str, Any]]:
    batch, queries = draw(st.integers(1, 2)), draw(st.integers(1, 50))
    options = draw(geometries(batch, queries))
    batch, keys = options.pop("batch", batch), options.pop("keys", queries)
    options["num_sink_tokens"] = draw(st.sampled_from([0, 0, 1, 6]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    usage = draw(st.sampled_from([0.0, 0.2, 1.0]))
    return (torch.rand(batch, queries, HEADS, generator=generator) < usage).float(), keys, options


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([1, 2, 7, 20, 10**6]), st.sampled_from([4, 16]))
def test_every_pair_that_a_route_opens_is_in_the_lists(
    drawn: tuple[torch.Tensor, int, dict[str, Any]], window: int, block: int
) -> None:
    route, keys, options = drawn
    batch, queries, _ = route.shape
    geometry = make_geometry(Problem(window, 1.0, **options), batch, queries, keys, route.device)
    everything, here = visible_keys(batch, queries, keys, window, **options)
    assert torch.equal(geometry.has_far(), (everything & ~here).any(-1))
    opened = torch.where(route[..., None] != 0, everything[:, :, None], here[:, :, None])
    assert needed_scores(route, geometry) == int(opened.sum())

    near = near_rows(geometry, block, keys)
    for item, query, key in here.nonzero().tolist():
        begin, end = near[item, key // block].tolist()
        assert begin <= query < end

    rows = make_row_list((route != 0) & geometry.has_far()[..., None], KV_HEADS)
    parts, spans = list_rows(rows, geometry, block, keys), list_spans(rows, geometry, block, far=False)
    for which, count in enumerate(rows.counts.tolist()):
        codes = rows.codes[which, :count].tolist()
        assert codes == sorted(set(codes))
        for number, code in enumerate(codes):
            query, head = code // GROUP, which % KV_HEADS * GROUP + code % GROUP
            assert route[which // KV_HEADS, query, head] == 1
            for key in everything[which // KV_HEADS, query].nonzero()[:, 0].tolist():
                begin, end = parts[which, key // block].tolist()
                assert begin <= number < end
                first, stop = spans[which, number // block].tolist()
                assert first <= key < stop
    listed = (route != 0) & geometry.has_far()[..., None]
    assert int(rows.counts.sum()) == int(listed.sum())


def test_a_work_list_starts_with_the_largest_and_leaves_out_the_empty() -> None:
    assert work_list(torch.tensor([[3, 0, 5], [5, 1, 0]])).tolist() == [2, 3, 0, 4, -1, -1]


def test_the_blocks_of_a_busy_head_come_before_those_of_idle_ones() -> None:
    route = torch.zeros(1, 400, 2)
    route[:, ::2, 1] = 1.0  # one head opens 200 rows
    route[:, 10::130, 0] = 1.0  # the other four
    geometry = make_geometry(Problem(5, 1.0), 1, 400, 400, route.device)
    rows = make_row_list((route != 0) & geometry.has_far()[..., None], 2)
    sizes = span_tiles(list_spans(rows, geometry, 16, far=False), 32)
    work = work_list(sizes)
    ordered = [int(sizes.reshape(-1)[x]) for x in work.tolist() if x >= 0]
    assert ordered == sorted(ordered, reverse=True)
    assert len(ordered) == 1 + 13
    assert sizes[1, 12] == 13  # of 400 keys, tiles of 32


@pytest.mark.parametrize("length", [100, 512, 5000])
def test_decoding_gets_splits_for_what_the_routes_open(length: int) -> None:
    lengths, starts = (
        torch.tensor([length, 700], dtype=torch.int32),
        torch.tensor([0, 100], dtype=torch.int32),
    )
    opens = torch.zeros(2, 1, HEADS, dtype=torch.bool)
    opens[0, 0, 4] = True  # the second KV head of the first item
    work = decode_work(opens, lengths, starts, KV_HEADS, window=30, split=512)
    full, rest = (torch.diff(x, prepend=x.new_zeros(1)).tolist() for x in (work.full, work.rest))
    assert full == [0, length // 512, 0, 0]
    assert rest == [1, int(length % 512 > 0), 1, 1]
    everything = decode_work(torch.ones_like(opens), lengths, starts, KV_HEADS, window=30, split=512)
    assert int(everything.full[-1]) == 2 * (length // 512) + 2


def test_tile_counts_follow_usage() -> None:
    torch.manual_seed(0)
    ratio, computed = {}, {}
    for usage in (0.0, 0.05, 1.0):
        route = (torch.rand(1, 4096, 8) < usage).float()
        counts = count_tiles(route, 4096, 2, 128, Problem(256, 1.0))
        ratio[usage] = counts["forward"].ratio
        computed[usage] = counts["forward"].listed
        assert min(count.ratio for count in counts.values()) >= 1.0
    assert computed[0.0] == 0
    assert 0.05 <= computed[0.05] / computed[1.0] < 0.07  # blocks that are not full, and the diagonal
    assert ratio[1.0] < 1.25  # the window pass, and the tiles on the diagonal
