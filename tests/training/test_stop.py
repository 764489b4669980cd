"""A signal to one rank: all ranks save at the same step, exit 0, and the run goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.data.batches import BatchSource, MicroBatch
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.training.pretrain import main

ROOT = Path(__file__).parents[2]


def signalled_run(options: list[str], step: int, number: int) -> int:
    """Trains; the last rank gets a signal, twice, while it prepares a step."""
    import torch

    original = BatchSource.micro_batches

    def micro_batches(self: BatchSource, consumed_samples: int) -> list[MicroBatch]:
        if consumed_samples == (step - 1) * 4 and torch.distributed.get_rank() + 1 == int(
            os.environ["WORLD_SIZE"]
        ):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        return original(self, consumed_samples)

    BatchSource.micro_batches = micro_batches  # type: ignore[method-assign]
    return main(options)


def losses(folder: Path) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train/lm_loss"], line["train/grad_norm"]) for line in lines]


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_a_signalled_run_saves_exits_0_and_resumes_bit_for_bit(
    options: list[str], tmp_path: Path, ranks: int, number: int
) -> None:
    more = [*options, "--training.train_steps", "6"]
    assert run_distributed(signalled_run, ranks, more, 3, number) == [0] * ranks
    assert CheckpointReader(tmp_path / "checkpoints").step == 3
    assert run_distributed(main, ranks, more) == [0] * ranks
    stopped = losses(tmp_path)

    more += [
        "--checkpoint.directory",
        str(tmp_path / "b"),
        "--logging.directory",
        str(tmp_path / "b" / "logs"),
    ]
    assert run_distributed(main, ranks, more) == [0] * ranks
    assert stopped == losses(tmp_path / "b")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["deepspeed", "launcher of the node", "rank 1"])
def test_sigterm_under_the_deepspeed_launcher_saves_and_leaves_no_process(
    options: list[str], tmp_path: Path, victim: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    script = [str(ROOT / "launch" / "pretrain.sh"), *options, "--training.train_steps", "100000"]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            ["deepspeed", "--num_gpus", "2", *script], env=environment, stdout=output, stderr=output
        )
    metrics = tmp_path / "logs" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.2)
    family = psutil.Process(process.pid).children(recursive=True)
    launcher = family[0]
    ranks = launcher.children()
    assert len(ranks) == 2, (tmp_path / "output").read_text()
    {"deepspeed": psutil.Process(process.pid), "launcher of the node": launcher}.get(
        victim, ranks[1]
    ).terminate()

    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    process.wait(timeout=60)
    assert (process.returncode == 0) == (victim == "rank 1")
    reader = CheckpointReader(tmp_path / "checkpoints")
    reader.verify()
    assert f"stopped after step {reader.step}: " in (tmp_path / "output").read_text()
