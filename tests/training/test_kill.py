"""One rank of a run that saves every step is killed at random moments; a full disk: what is resumed is complete."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from save_steps import record_save_steps, recorded_step

from megatron_aha.checkpoint.format import CheckpointReader, complete_steps
from megatron_aha.checkpoint.index import step_of
from megatron_aha.checkpoint.reader import step_folders
from megatron_aha.testing.distributed import RankFailure, run_distributed
from megatron_aha.training.pretrain import main
from megatron_aha.training.saving import CheckpointSaver


def train_until_killed(options: list[str], victim: int, notes: Path) -> None:
    """Trains without end; one rank notes its process and which step of a save it is in."""
    if torch.distributed.get_rank() == victim:
        record_save_steps(notes / "step")
        (notes / "pid").write_text(str(os.getpid()))
    main(options)


def latest(directory: Path) -> str:
    path = directory / "latest"
    return path.read_text().strip() if path.exists() else ""


@contextmanager
def killer(directory: Path, notes: Path, moment: float, checkpoints: int) -> Iterator[None]:
    """Kills the process of the notes, some time after the run in the body has written one or two checkpoints.

    This process does it: a thread of that one would have to wait for Python's lock, and so miss what holds it.

    Args:
        directory: where the run saves.
        notes: folder of the file ``pid``.
        moment: share of the time between the first and the last checkpoint that passes after the last.
        checkpoints: that are waited for.
    """
    over = threading.Event()

    def next_checkpoint() -> float:
        before = latest(directory)
        while latest(directory) == before:
            if over.wait(0.002):
                break
        return time.monotonic()

    def kill() -> None:
        times = [next_checkpoint() for _ in range(checkpoints)]
        if not over.wait(moment * (times[-1] - times[0])):
            os.kill(int((notes / "pid").read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def kill_once(
    options: list[str], directory: Path, notes: Path, victim: int, moment: float, checkpoints: int = 2
) -> str:
    """Runs two ranks until one is killed and returns the step of a save that it was in; see ``killer``."""
    notes.mkdir()
    with killer(directory, notes, moment, checkpoints), pytest.raises(RankFailure, match="exit code -9"):
        run_distributed(train_until_killed, 2, options, victim, notes)
    return recorded_step(notes / "step")


@pytest.mark.parametrize(
    "kills", [2, pytest.param(30, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)])]
)
def test_one_rank_killed_at_random_moments_of_a_run_that_saves_every_step(
    options: list[str], tmp_path: Path, kills: int
) -> None:
    chance = random.Random(kills)
    # A short step and a large checkpoint, so that much of the time goes into saving.
    options += "--model.num_layers 1 --model.vocab_size 20001 --training.global_batch_size 2".split()
    options += "--training.train_steps 100000 --checkpoint.keep_last 2".split()
    options += (
        "--training.eval_interval 0 --logging.log_interval 1000000 --logging.heatmap_interval 0".split()
    )
    directory = tmp_path / "checkpoints"
    steps: Counter[str] = Counter()
    reached = 0
    for number in range(kills):
        # Every other start writes beside the training.
        every_step = ["--checkpoint.save_interval", "1", "--checkpoint.asynchronous", str(number % 2 > 0)]
        victim, moment = chance.randrange(2), chance.random()
        notes = tmp_path / f"kill-{number}"
        steps[kill_once([*options, *every_step], directory, notes, victim, moment)] += 1
        reader = CheckpointReader(directory)
        reader.verify()
        # Each start has saved at least twice more: it resumed from what the one before had left.
        assert reader.step >= reached + 2
        reached = reader.step
        # Folders that look like steps are complete, however a save was killed.
        assert complete_steps(directory) == [step_of(folder.name) for folder in step_folders(directory)]
    print(f"{kills} kills, {reached} steps:")
    print("\n".join(f"{count:3} {step}" for step, count in steps.most_common()))
    assert steps.total() == kills

    # A run that nobody killed before the same step holds the same bits.
    undisturbed = tmp_path / "undisturbed" / "checkpoints"
    once = ["--checkpoint.save_interval", str(reached), "--checkpoint.directory", str(undisturbed)]
    kill_once([*options, *once], undisturbed, tmp_path / "kill-last", 0, 0, checkpoints=1)
    expected = CheckpointReader(undisturbed)
    assert expected.step == reached and expected.names() == reader.names()
    assert [name for name in reader.names() if not torch.equal(reader.read(name), expected.read(name))] == []


def train_on_a_full_disk(options: list[str], victim: int) -> None:
    """Trains; after the first checkpoint one rank can write no file longer than 10 kB, as if its disk were full."""
    original = CheckpointSaver._end

    def end(*args: Any) -> None:
        original(*args)
        if torch.distributed.get_rank() == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))

    CheckpointSaver._end = end  # type: ignore[method-assign]
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
