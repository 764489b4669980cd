"""One rank of a run that saves every step is killed at random moments; a full disk: what is resumed is complete."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.testing.distributed import RankFailure, run_distributed
from megatron_aha.training.pretrain import main
from megatron_aha.training.saving import CheckpointSaver


def train_until_killed(options: list[str], victim: int, seconds: float) -> None:
    """Trains without end, saving every step; one rank is killed some time after the first save of this start."""
    original = CheckpointSaver.save

    def save(*args: Any) -> None:
        original(*args)
        if torch.distributed.get_rank() == victim and not armed.is_set():
            armed.set()
            threading.Thread(target=kill, daemon=True).start()

    def kill() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    armed = threading.Event()
    CheckpointSaver.save = save  # type: ignore[method-assign]
    main(options)


def stage_of(directory: Path) -> str:
    """Returns which step of a save was cut, as its remains tell."""
    latest = (directory / "latest").read_text().strip()
    newest = max(path.name for path in directory.glob("step_*"))
    temporary = list(directory.glob(".tmp-step_*"))
    if temporary:
        files = {path.name for path in temporary[0].iterdir()}
        if "index.json" in files:
            return "before the rename"
        if "state.json" in files:
            return "writing the index"
        return "writing tensors"
    if newest != latest:
        return "before latest"
    if list(directory.glob(".old-*")) or len(list(directory.glob("step_*"))) > 2:
        return "removing old ones"
    return "training"


@pytest.mark.parametrize(
    "kills", [3, pytest.param(30, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)])]
)
def test_one_rank_killed_at_random_moments_of_a_run_that_saves_every_step(
    options: list[str], tmp_path: Path, kills: int
) -> None:
    chance = random.Random(kills)
    options += "--training.train_steps 100000 --checkpoint.save_interval 1 --checkpoint.keep_last 2".split()
    options += (
        "--training.eval_interval 0 --logging.log_interval 1000000 --logging.heatmap_interval 0".split()
    )
    directory = tmp_path / "checkpoints"
    stages: Counter[str] = Counter()
    step = 0
    for _ in range(kills):
        with pytest.raises(RankFailure, match="exit code -9"):
            run_distributed(train_until_killed, 2, options, chance.randrange(2), chance.uniform(0, 0.5))
        stages[stage_of(directory)] += 1
        reader = CheckpointReader(directory)
        reader.verify()
        # Each start has saved at least once more: it resumed from what the one before had left.
        assert reader.step > step
        step = reader.step
    print(f"{kills} kills, {step} steps:", dict(stages))
    assert sum(stages.values()) == kills


def train_on_a_full_disk(options: list[str], victim: int) -> None:
    """Trains; after the first checkpoint one rank can write no file longer than 10 kB, as if its disk were full."""
    original = CheckpointSaver._complete

    def complete(*args: Any) -> None:
        original(*args)
        if torch.distributed.get_rank() == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))

    CheckpointSaver._complete = complete  # type: ignore[method-assign]
    main(options)


@pytest.mark.parametrize(("victim", "asynchronous"), [(0, "false"), (1, "false"), (1, "true")])
def test_a_disk_that_is_full_for_one_rank_stops_the_run_and_leaves_the_last_checkpoint(
    options: list[str], tmp_path: Path, victim: int, asynchronous: str
) -> None:
    options += "--training.train_steps 6 --checkpoint.save_interval 2".split()
    options += ["--checkpoint.asynchronous", asynchronous]
    with pytest.raises(RankFailure) as caught:
        run_distributed(train_on_a_full_disk, 2, options, victim)
    told = str(caught.value)
    assert told.count("the checkpoint of step 4 could not be written: no space left on disk") == 2, told
    reader = CheckpointReader(tmp_path / "checkpoints")
    reader.verify()
    assert reader.step == 2
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))
