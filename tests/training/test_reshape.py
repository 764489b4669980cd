"""A checkpoint saved under one layout and loaded under another goes on as if nothing had changed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from layouts import RANKS, Layout
from megatron.core import parallel_state

from megatron_aha.checkpoint.reader import CheckpointReader
from megatron_aha.checkpoint.weights import load_weights
from megatron_aha.config.run import RunConfig
from megatron_aha.models import build_stage
from megatron_aha.parallel.layout import build_groups
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.testing.tiny import tiny_micro_batches
from megatron_aha.testing.training import start_tiny
from megatron_aha.training.engine import TrainingEngine, init_distributed
from megatron_aha.training.restoring import Position, restore_training
from megatron_aha.training.saving import CheckpointSaver

SAVED_STEP, LAST_STEP = 3, 8
FACTORS = ("tp", "pp", "vp", "cp", "dp", "zero")
LAYOUTS = [
    layout
    for tp, pp, vp, cp, dp, zero in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2, 3))
    if (layout := Layout(tp, tp > 1, pp, vp, cp, dp, zero)).ranks <= RANKS
    and not (pp > 1 and zero > 1)
    and vp <= pp
]


def every_change() -> list[tuple[Layout, Layout]]:
    """Returns a few pairs of layouts in which every factor changes from each of its values, and to each."""

    def changes(pair: tuple[Layout, Layout]) -> set[tuple[object, ...]]:
        values = [(factor, getattr(pair[0], factor), getattr(pair[1], factor)) for factor in FACTORS]
        changed = [value for value in values if value[1] != value[2]]
        return {(factor, "from", a) for factor, a, _ in changed} | {
            (factor, "to", b) for factor, _, b in changed
        }

    pairs = list(itertools.permutations(LAYOUTS, 2))
    missing = set().union(*map(changes, pairs))
    chosen = []
    while missing:
        chosen.append(
            max(pairs, key=lambda pair: len(changes(pair) & missing) / (pair[0].ranks + pair[1].ranks))
        )
        missing -= changes(chosen[-1])
    return chosen


def train(engine: TrainingEngine, config: RunConfig, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        batches = tiny_micro_batches(config, step, dp_rank=rank, dp_size=size)
        losses.append(engine.train_step(step, batches).lm_loss)
    return losses


def stay(configs: list[RunConfig]) -> list[list[float]]:
    """Trains each configuration, saves on the way, and returns the losses after the save."""
    found = []
    for config in configs:
        engine = start_tiny(config)
        train(engine, config, 1, SAVED_STEP)
        CheckpointSaver(config, None, print).save(engine, Position(SAVED_STEP, SAVED_STEP * 4, ""))
        found.append(train(engine, config, SAVED_STEP + 1, LAST_STEP))
        engine.close()
    return found


def move(configs: list[RunConfig]) -> list[list[float]]:
    """Loads each configuration's checkpoint and returns the losses of the steps behind it."""
    init_distributed()
    found = []
    for config in configs:
        build_groups(config.parallel, config.training.seed)
        model = build_stage(config.model, config.aha, config.parallel, config.training)
        assert config.checkpoint.directory is not None
        reader = CheckpointReader(config.checkpoint.directory)
        load_weights(model, reader, seed=0, new_router=False)
        engine = TrainingEngine(model, config)
        position = restore_training(engine, reader, fresh_optimizer=False)
        assert (position.step, engine.optimizer_state.steps()) == (SAVED_STEP, SAVED_STEP)
        found.append(train(engine, config, SAVED_STEP + 1, LAST_STEP))
        engine.close()
    return found


def in_pools(function: Any, work: list[tuple[Layout, RunConfig]]) -> list[list[float]]:
    """Runs a function on the configurations, those of equally many ranks in one pool."""
    results: dict[int, list[float]] = {}
    for ranks in {layout.ranks for layout, _ in work}:
        mine = [number for number, (layout, _) in enumerate(work) if layout.ranks == ranks]
        losses = run_distributed(function, ranks, [work[number][1] for number in mine], timeout=1500)[0]
        results |= dict(zip(mine, losses, strict=True))
    return [results[number] for number in range(len(work))]


@pytest.mark.parametrize(
    ("pairs", "same"),
    [
        pytest.param(
            every_change(),
            LAYOUTS[::18],
            id="every change of every factor",
            marks=[pytest.mark.slow, pytest.mark.timeout(600)],
        ),
        pytest.param(
            list(itertools.permutations(LAYOUTS, 2)),
            LAYOUTS,
            id="all pairs",
            marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)],
        ),
    ],
)
def test_five_losses_behind_a_change_of_layout_are_those_of_staying(
    pairs: list[tuple[Layout, Layout]], same: list[Layout], tmp_path: Path
) -> None:
    def config_of(layout: Layout, source: Layout) -> RunConfig:
        config = layout.config()
        config.model.num_layers = 4  # one model in all layouts, as deep as two interleaved stages need
        config.checkpoint.directory = str(tmp_path / str(source))
        return config

    pairs = pairs + [(layout, layout) for layout in same]
    sources = list({source: None for source, _ in pairs})
    stayed = dict(
        zip(sources, in_pools(stay, [(source, config_of(source, source)) for source in sources]), strict=True)
    )
    moved = in_pools(move, [(target, config_of(target, source)) for source, target in pairs])
    wrong, largest = [], 0.0
    for (source, target), losses in zip(pairs, moved, strict=True):
        expected = stayed[source]
        assert len(losses) == LAST_STEP - SAVED_STEP
        error = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        largest = max(largest, error)
        if error > (0 if source == target else 1e-5):
            wrong.append(f"{source} to {target}: {error:.1e}")
    print(f"{len(pairs)} changes of {len(sources)} layouts, largest error {largest:.1e}")
    assert wrong == []
