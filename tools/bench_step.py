#!/usr/bin/env python3
"""Seconds of a training step with All-or-Here Attention over those of the same model without, in one process, in turns.

Whole steps on the real engine: forward, backward and optimizer, fp32, one document of --length tokens. The routers'
bias is set so that about --usage of the token-heads choose *all*; what they then chose is printed. The time of a step
is split in two: core attention, and everything else, where the router is.

    python tools/bench_step.py --model configs/model/smollm2-135m.yaml --layers 4 --length 4096 --usage 0.1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import torch
from torch import Tensor, nn

from megatron_aha.attention.core import AHACoreAttention, DenseCoreAttention
from megatron_aha.checkpoint.weights import initialise_weights
from megatron_aha.config.parse import parse_run
from megatron_aha.config.run import RunConfig
from megatron_aha.data.batches import MicroBatch
from megatron_aha.entry import run_alone_without_launcher, run_and_exit
from megatron_aha.models import build_stage
from megatron_aha.parallel.layout import single_process
from megatron_aha.training.engine import TrainingEngine, init_distributed


@dataclass
class StepTime:
    """Seconds of one step, and of core attention within it; usage of full attention, 1 for a dense model."""

    step: float
    core: float
    usage: float

    @property
    def rest(self) -> float:
        """Seconds of everything but core attention."""
        return self.step - self.core


class Stopwatch:
    """Adds up the seconds that the core attention of all layers takes, forward and backward, on a CPU."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        for module in model.modules():
            if isinstance(module, (AHACoreAttention, DenseCoreAttention)):
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end)
                module.register_full_backward_pre_hook(self._begin)
                module.register_full_backward_hook(self._end)

    def _begin(self, *_: object) -> None:
        self.seconds -= time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds += time.perf_counter()


class Trainer:
    """A model of the run's shape with random weights on the training engine."""

    def __init__(self, config: RunConfig) -> None:
        model = build_stage(config.model, config.aha, config.parallel, config.training)
        initialise_weights(model, config.training.seed)
        self.stopwatch = Stopwatch(model)
        self.engine = TrainingEngine(model, config)
        self.steps = 0

    def step(self, batch: MicroBatch) -> StepTime:
        """Trains one step on a batch and returns what it took."""
        self.steps += 1
        self.stopwatch.seconds = 0.0
        begin = time.perf_counter()
        result = self.engine.train_step(self.steps, [batch])
        seconds = time.perf_counter() - begin
        return StepTime(
            seconds, self.stopwatch.seconds, 1.0 if result.router is None else result.router.usage
        )


def run_config(options: argparse.Namespace, enabled: bool) -> RunConfig:
    """Returns the run: one process, fp32, a learning rate so small that the routes stay what they are."""
    config = parse_run(["--config", options.model]).config
    config.model.num_layers = options.layers or config.model.num_layers
    config.model.vocab_size = options.vocabulary or config.model.vocab_size
    config.aha.enabled = enabled
    config.aha.window = options.window
    config.aha.router_grad = options.router_grad
    config.aha.init_std = 0.02
    # The router sees states of mean square 1, so its logits have this deviation before the bias.
    deviation = config.aha.init_std * config.model.hidden_size**0.5
    config.aha.init_bias = deviation * NormalDist().inv_cdf(options.usage)
    config.data.seq_length = options.length
    config.training.precision, config.training.zero_stage = "fp32", 0
    config.training.micro_batch_size = config.training.global_batch_size = 1
    config.training.lr, config.training.min_lr, config.training.warmup_steps = 1e-9, 0.0, 0
    return config


def one_document(config: RunConfig) -> MicroBatch:
    """Returns random tokens as a single document."""
    length = config.data.seq_length
    draw = torch.Generator().manual_seed(0)
    tokens: Tensor = torch.randint(config.model.vocab_size, (length + 1,), generator=draw)
    return MicroBatch(
        tokens=tokens[:-1],
        labels=tokens[1:],
        loss_mask=torch.ones(length),
        position_ids=torch.arange(length),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
    )


def compare(options: argparse.Namespace) -> dict[str, float]:
    """Returns the medians over the timed steps of each ratio, routed over dense, and shares."""
    run_alone_without_launcher()
    init_distributed()
    with single_process():
        batch = one_document(run_config(options, True))
        pair = [Trainer(run_config(options, enabled)) for enabled in (False, True)]
        for trainer in pair:
            trainer.step(batch)  # memory, threads
        times = [[trainer.step(batch) for trainer in pair] for _ in range(options.steps)]

    def median(values: list[float]) -> float:
        return statistics.median(values)

    return {
        "step": median([routed.step / dense.step for dense, routed in times]),
        "core": median([routed.core / dense.core for dense, routed in times]),
        "rest": median([routed.rest / dense.rest for dense, routed in times]),
        "core_share_dense": median([dense.core / dense.step for dense, _ in times]),
        "usage": times[-1][1].usage,
    }


def main(argv: Sequence[str]) -> None:
    """Prints the ratios, and writes them as JSON with ``--json``."""
    parser = argparse.ArgumentParser(prog="bench_step.py", description=main.__doc__)
    parser.add_argument("--model", required=True, metavar="YAML", help="configuration with the model's sizes")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--vocabulary", type=int, help="instead of the model's own size")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the document")
    parser.add_argument("--window", type=int, default=256, help="keys, the token itself included")
    parser.add_argument("--usage", type=float, default=0.1, help="share of token-heads that choose all")
    parser.add_argument("--router-grad", default="exact", help="exact, sampled:RATE or none")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each model")
    parser.add_argument("--json", metavar="FILE", help="write the ratios here as well")
    options = parser.parse_args(argv)
    ratios = compare(options)
    print(
        f"{options.length} tokens, window {options.window}, usage {ratios['usage']:.3f}, router gradient "
        f"{options.router_grad}, {torch.get_num_threads()} threads"
    )
    print("seconds with All-or-Here Attention over seconds of the dense model:")
    print(f"  whole step      {ratios['step']:.3f}")
    print(f"  core attention  {ratios['core']:.3f}   ({ratios['core_share_dense']:.0%} of the dense step)")
    print(f"  everything else {ratios['rest']:.3f}")
    if options.json:
        Path(options.json).write_text(json.dumps(ratios, indent=2) + "\n")


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
