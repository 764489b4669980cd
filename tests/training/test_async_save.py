"""Saving beside the training writes what saving at once writes, however long it takes, and tells what went wrong."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_aha.checkpoint.format import CheckpointReader, CheckpointWriter
from megatron_aha.testing.distributed import RankFailure, run_distributed
from megatron_aha.training.engine import StepResult, TrainingEngine
from megatron_aha.training.pretrain import main

STEPS = "--training.train_steps 6 --checkpoint.save_interval 2 --training.eval_interval 0".split()


def slow_run(options: list[str], zero_stage: int) -> list[str]:
    """Trains; the files of step 2 are written only when step 4 is done. Returns what existed after each step."""
    two_more = threading.Event()
    write_file, train_step = CheckpointWriter.write_file, TrainingEngine.train_step
    existing: list[str] = []

    def write_late(self: CheckpointWriter, *args: Any) -> Any:
        if self.step == 2:
            two_more.wait(60)
        return write_file(self, *args)

    def count(self: TrainingEngine, step: int, *args: Any) -> StepResult:
        result = train_step(self, step, *args)
        directory = Path(options[options.index("--checkpoint.directory") + 1])
        existing.append(",".join(sorted(path.name[-1] for path in directory.glob("step_*"))))
        if step == 4:
            two_more.set()
        return result

    CheckpointWriter.write_file = write_late  # type: ignore[method-assign]
    TrainingEngine.train_step = count  # type: ignore[method-assign]
    more = ["--checkpoint.asynchronous", "true", "--training.zero_stage", str(zero_stage)]
    assert main([*options, *STEPS, *more]) == 0
    return existing


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_what_is_written_late_is_the_run_as_it_was(
    options: list[str], tmp_path: Path, zero_stage: int
) -> None:
    existing = run_distributed(slow_run, 2, options, zero_stage)[0]
    # Saving step 4 waits for step 2, which nothing has waited for before.
    assert existing[:4] == ["", "", "", ""]
    atonce = [
        *options,
        "--checkpoint.directory",
        str(tmp_path / "atonce"),
        "--training.zero_stage",
        str(zero_stage),
    ]
    assert run_distributed(main, 2, [*atonce, *STEPS]) == [0, 0]
    for step in (2, 4, 6):
        late = CheckpointReader(tmp_path / "checkpoints" / f"step_0000000{step}")
        soon = CheckpointReader(tmp_path / "atonce" / f"step_0000000{step}")
        late.verify()
        assert (late.names(), late.state) == (soon.names(), soon.state)
        assert [name for name in late.names() if not torch.equal(late.read(name), soon.read(name))] == []


def failing_run(options: list[str]) -> None:
    """Trains without end; the last rank's first write fails with what no rule foresees."""

    def fail(self: CheckpointWriter, *args: Any) -> Any:
        raise RuntimeError("the cable is cut")

    if torch.distributed.get_rank() == 1:
        CheckpointWriter.write_file = fail  # type: ignore[method-assign]
    main([*options, "--training.train_steps", "100000", "--checkpoint.save_interval", "2"])


def test_an_error_of_the_thread_ends_the_run(options: list[str], tmp_path: Path) -> None:
    options += ["--checkpoint.asynchronous", "true", "--training.eval_interval", "0"]
    with pytest.raises(RankFailure, match="RuntimeError: the cable is cut"):
        run_distributed(failing_run, 2, options, timeout=60)
    assert not list((tmp_path / "checkpoints").glob("step_*"))
