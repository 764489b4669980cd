"""Every layout of up to four ranks: trained to the numbers of one process, or refused before anything is built."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compare import largest_relative_error
from layouts import LAYERS_PER_STAGE, RANKS, Layout, Measured, all_layouts, measure

from megatron_aha.config.parse import to_yaml
from megatron_aha.config.validate import problems
from megatron_aha.errors import UserError
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.training.engine import StepResult
from megatron_aha.training.pretrain import main

REFUSED = {layout: problems(layout.config(), layout.ranks) for layout in all_layouts()}
WORKING = [layout for layout, found in REFUSED.items() if not found]
UNTIED = [replace(layout, tied=False) for layout in WORKING]
# What four ranks cannot combine: three factors at a time, and sharding by four with copies.
EIGHT_RANKS = [
    Layout(tp=2, sp=True, pp=2, cp=2, recompute="selective"),
    Layout(tp=2, sp=True, pp=2, dp=2, zero=1, recompute="full"),
    Layout(tp=2, pp=2, vp=2, dp=2, zero=1),
    Layout(tp=2, sp=True, cp=2, dp=2, zero=3),
    Layout(tp=4, sp=True, dp=2, zero=2),
]
FACTORS = ("tp", "sp", "pp", "vp", "cp", "dp", "zero", "recompute", "tied")


def pairwise(layouts: Iterable[Layout]) -> list[Layout]:
    """Returns a few layouts in which every pair of values of two factors occurs that occurs at all."""

    def pairs(layout: Layout) -> set[tuple[object, ...]]:
        values = [(factor, getattr(layout, factor)) for factor in FACTORS]
        return set(itertools.combinations(values, 2))

    layouts = list(layouts)
    missing = set().union(*map(pairs, layouts))
    chosen = []
    while missing:
        chosen.append(max(layouts, key=lambda layout: len(pairs(layout) & missing) / layout.ranks))
        missing -= pairs(chosen[-1])
    return chosen


def measured(layouts: list[Layout], steps: int) -> dict[Layout, Measured]:
    """Trains the layouts for some steps, those of equally many ranks in one pool."""
    found = {}
    for ranks in sorted({layout.ranks for layout in layouts}):
        same = [layout for layout in layouts if layout.ranks == ranks]
        results = run_distributed(measure, ranks, [layout.config() for layout in same], steps, timeout=7000)
        found |= dict(zip(same, results[0], strict=True))
    return found


def difference(mine: Measured, alone: Measured) -> list[str]:
    """Returns what differs from one process, in words."""
    told = [f"copies of {name}" for name in mine.run.disagreeing]
    for what in ("gradients", "weights"):
        error, name = largest_relative_error(getattr(mine.run, what), getattr(alone.run, what))
        if not error <= 1e-5:
            told.append(f"{what} of {name} by {error:.1e}")
    for step, (one, other) in enumerate(zip(mine.run.steps, alone.run.steps, strict=True), 1):
        told += [f"step {step}: {text}" for text in step_difference(one, other)]
    return told


def step_difference(one: StepResult, other: StepResult) -> list[str]:
    """Returns what differs between two results of a step, in words."""
    assert one.router is not None and other.router is not None
    told = []
    for what, a, b in (
        ("loss", one.lm_loss, other.lm_loss),
        ("gradient norm", one.grad_norm, other.grad_norm),
        ("router loss", one.router.router_loss, other.router.router_loss),
    ):
        if not abs(a - b) <= 1e-5 * abs(b):
            told.append(f"{what} {a} instead of {b}")
    for what in ("usage", "usage_beyond_window", "usage_per_head", "usage_beyond_window_per_head"):
        if not torch.equal(*(torch.as_tensor(getattr(step.router, what)) for step in (one, other))):
            told.append(what)
    return told


def compare_with_one_process(layouts: list[Layout], steps: int) -> dict[str, list[str]]:
    """Trains the layouts; returns by layout what differs from one process, for those where anything does."""
    models = sorted({(layout.layers, layout.tied) for layout in layouts})
    # One sample at a time, which no layout of several ranks without stages does.
    configs = [Layout(pp=layers // LAYERS_PER_STAGE, tied=tied).alone() for layers, tied in models]
    alone = dict(zip(models, run_distributed(measure, 1, configs, steps)[0], strict=True))
    for reference in alone.values():
        router = reference.run.steps[0].router
        assert router is not None
        assert ((router.usage_per_head > 0.02) & (router.usage_per_head < 0.98)).all()
        assert reference.smallest_logit > 1e-4
    results = measured(layouts, steps)
    print(f"{len(results)} layouts, smallest logit {min(x.smallest_logit for x in alone.values()):.1e}")
    found = {
        str(layout): difference(mine, alone[layout.layers, layout.tied]) for layout, mine in results.items()
    }
    return {layout: told for layout, told in found.items() if told}


@pytest.mark.parametrize(
    ("layouts", "steps"),
    [
        pytest.param(
            pairwise(WORKING + UNTIED), 2, id="pairwise", marks=[pytest.mark.slow, pytest.mark.timeout(600)]
        ),
        pytest.param(WORKING, 1, id="all", marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)]),
        pytest.param(UNTIED, 1, id="all-untied", marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)]),
        pytest.param(WORKING, 5, id="all-5-steps", marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)]),
    ],
)
def test_layouts_train_to_the_numbers_of_one_process(layouts: list[Layout], steps: int) -> None:
    assert compare_with_one_process(layouts, steps) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_ranks_train_to_the_numbers_of_one_process() -> None:
    for layout in EIGHT_RANKS:
        assert layout.ranks == 8 and problems(layout.config(), 8) == []
    assert compare_with_one_process(EIGHT_RANKS, 2) == {}


def test_the_table_has_what_it_should() -> None:
    # twelve ways to share at most four ranks, times sequence parallelism, chunks, ZeRO and recompute
    assert len(REFUSED) == 12 * 2 * 2 * 4 * 3
    assert len(WORKING) == (12 * 4 + 5 * 2 * 2) * 3
    for layout, found in REFUSED.items():
        refused = (layout.pp > 1 and layout.zero >= 2) or (layout.sp and layout.tp == 1)
        refused |= layout.vp > layout.pp
        assert bool(found) == refused, (str(layout), found)


@pytest.mark.parametrize("layout", [Layout(pp=2, zero=2), Layout(sp=True), Layout(vp=2)], ids=str)
def test_a_refused_layout_is_refused_before_any_process_group(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(layout.config()))
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": RANKS}.items():
        monkeypatch.setenv(name, str(value))

    def tripwire(*_: object, **__: object) -> None:
        raise AssertionError("a process group was asked for")

    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(torch.distributed, name, tripwire)
    with pytest.raises(UserError) as caught:
        main(["--config", str(path)])
    assert str(caught.value).splitlines() == problems(layout.config(), RANKS)
