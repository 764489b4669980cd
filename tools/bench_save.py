#!/usr/bin/env python3
"""Seconds of saving a training run: at once, beside the training, and ``torch.save`` of the same tensors, in turns.

A model of the given sizes with random weights and its optimizer, fp32, in one process. ``torch.save`` returns before
the disk has the bytes, a checkpoint after. Beside the training, what holds the loop up is copying the tensors and
asking whether the copy is written; the steps meanwhile share processor and memory with the writing on a CPU.

    python tools/bench_save.py --model configs/model/smollm2-135m.yaml --directory /some/disk
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from bench_step import Trainer, one_document, run_config
from torch import Tensor

from megatron_aha.checkpoint.atomic import sync
from megatron_aha.config.run import RunConfig
from megatron_aha.entry import run_alone_without_launcher, run_and_exit
from megatron_aha.parallel.layout import single_process
from megatron_aha.training.engine import init_distributed
from megatron_aha.training.optimizer_state import MOMENTS
from megatron_aha.training.restoring import Position
from megatron_aha.training.saving import CheckpointSaver


def seconds_of(action: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def saved_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Returns the weights and both moments of each."""
    tensors = {}
    for name, weight in trainer.engine.model.named_parameters():
        tensors[name] = weight.detach()
        tensors |= {f"{key}.{name}": trainer.engine.optimizer_state.moment(weight, key) for key in MOMENTS}
    return tensors


class Saves:
    """Saves a run again and again, each time as another step.

    Args:
        trainer: what is saved.
        config: of the run; decides where to, and whether beside the training.
    """

    def __init__(self, trainer: Trainer, config: RunConfig) -> None:
        self.trainer = trainer
        self.saver = CheckpointSaver(config, None, lambda line: None)
        self.steps = 0

    def save(self) -> None:
        """Begins a save, and ends it unless it goes on beside the training."""
        self.steps += 1
        self.saver.save(self.trainer.engine, Position(self.steps, 0, ""))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Returns medians in seconds, and the bytes that a save writes."""
    run_alone_without_launcher()
    init_distributed()
    with single_process():
        configs = [run_config(options, True) for _ in range(2)]
        for config, name in zip(configs, ("atonce", "beside"), strict=True):
            config.checkpoint.directory, config.checkpoint.asynchronous = str(folder / name), name == "beside"
        trainer = Trainer(configs[0])
        batch = one_document(configs[0])
        trainer.step(batch)  # memory, threads
        atonce, beside = (Saves(trainer, config) for config in configs)
        tensors = saved_tensors(trainer)
        times: list[dict[str, float]] = []
        for _ in range(options.saves + 1):
            plain = seconds_of(lambda: torch.save(tensors, folder / "plain.pt"))
            on_disk = plain + seconds_of(lambda: sync(folder / "plain.pt"))
            (folder / "plain.pt").unlink()
            row = {"torch_save": plain, "torch_save_on_disk": on_disk, "save": seconds_of(atonce.save)}
            row["held_up"] = seconds_of(beside.save)
            for _ in range(options.steps):
                trainer.step(batch)
                row["held_up"] += seconds_of(beside.saver.poll)
            row["waited"] = seconds_of(beside.saver.wait)
            times.append(row)
            for config in configs:
                shutil.rmtree(str(config.checkpoint.directory))
    # the first save takes the memory that later ones use again
    medians = {name: statistics.median(row[name] for row in times[1:]) for name in times[0]}
    return medians | {"bytes": float(sum(tensor.nbytes for tensor in tensors.values()))}


def main(argv: Sequence[str]) -> None:
    """Prints the seconds, and writes them as JSON with ``--json``."""
    parser = argparse.ArgumentParser(prog="bench_save.py", description=main.__doc__)
    parser.add_argument("--model", required=True, metavar="YAML", help="configuration with the model's sizes")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--vocabulary", type=int, help="instead of the model's own size")
    parser.add_argument(
        "--directory", metavar="FOLDER", help="on the disk to measure; default: temporary files"
    )
    parser.add_argument("--saves", type=int, default=3, help="timed saves of each kind")
    parser.add_argument("--steps", type=int, default=6, help="training steps beside which a save is written")
    parser.add_argument("--json", metavar="FILE", help="write the seconds here as well")
    parser.set_defaults(length=128, window=64, usage=0.1, router_grad="exact")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        found = measure(options, Path(folder))
    print(f"{found['bytes'] / 1e9:.2f} GB, {torch.get_num_threads()} threads, seconds:")
    print(f"  torch.save, not waiting for the disk  {found['torch_save']:.2f}")
    print(f"  torch.save, on the disk               {found['torch_save_on_disk']:.2f}")
    print(f"  a checkpoint at once                  {found['save']:.2f}")
    print(f"  holding up the loop, asynchronously   {found['held_up']:.2f}")
    print(f"  still to wait after {options.steps} steps            {found['waited']:.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
