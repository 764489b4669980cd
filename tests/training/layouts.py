"""The layouts that fit four processes, and how to run many of them in one pool of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_aha.attention.router import AHARouter
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.testing.tiny import tiny_config
from megatron_aha.testing.training import TinyRun, train_tiny

RANKS = 4
# Of every stage, and two for the alternating chunks of interleaved ones.
LAYERS_PER_STAGE = 2


@dataclass(frozen=True)
class Layout:
    """One cell of the table; ``str`` is its name in test reports."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vp: int = 1
    cp: int = 1
    dp: int = 1
    zero: int = 0
    recompute: str = "none"
    tied: bool = True

    def __str__(self) -> str:
        name = f"tp{self.tp}{'-sp' if self.sp else ''}-pp{self.pp}x{self.vp}-cp{self.cp}-dp{self.dp}"
        return f"{name}-zero{self.zero}-{self.recompute}{'' if self.tied else '-untied'}"

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def layers(self) -> int:
        return LAYERS_PER_STAGE * self.pp

    def config(self) -> RunConfig:
        """Returns the run; its global batch is the same however the layout cuts it.

        Without pipeline stages every rank has two micro-batches, which is what it takes to accumulate; with stages
        two or four, for the schedule.
        """
        parallel = ParallelConfig(
            tensor_model_parallel_size=self.tp,
            sequence_parallel=self.sp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_stages=self.vp,
            context_parallel_size=self.cp,
        )
        size = 1 if self.pp > 1 or self.dp > 1 else 2
        config = tiny_config(parallel, zero_stage=self.zero, micro_batch_size=size)
        config.model.num_layers = self.layers
        config.model.tied_embeddings = self.tied
        config.training.recompute = self.recompute
        config.data.blend = ["tiny"]
        return config

    def alone(self) -> RunConfig:
        """Returns the same model and global batch in one process, one sample at a time."""
        config = self.config()
        config.parallel = ParallelConfig()
        config.training.micro_batch_size = 1
        return config


def all_layouts(recomputes: tuple[str, ...] = ("none", "selective", "full")) -> Iterator[Layout]:
    """Yields every combination of at most four ranks, also those that validation refuses; tied embeddings."""
    for cell in itertools.product(
        (1, 2, 4), (False, True), (1, 2), (1, 2), (1, 2), (1, 2), (0, 1, 2, 3), recomputes
    ):
        layout = Layout(*cell)
        if layout.ranks <= RANKS:
            yield layout


@dataclass
class Measured:
    """One layout's first steps.

    Attributes:
        run: losses, statistics, gradients of the first step and weights after the last.
        smallest_logit: over all routers, tokens and heads of all ranks.
    """

    run: TinyRun
    smallest_logit: float


def measure(configs: list[RunConfig], steps: int) -> list[Measured]:
    """Trains each configuration for some steps in this pool of ranks, one after the other."""
    return [_measure(config, steps) for config in configs]


def _measure(config: RunConfig, steps: int) -> Measured:
    smallest = [float("inf")]

    def look(module: torch.nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
        if isinstance(module, AHARouter):
            smallest.append(float(logits.detach().abs().min()))

    with torch.nn.modules.module.register_module_forward_hook(look):
        run = train_tiny(config, steps, gradients_at=1)
    everywhere = torch.tensor(min(smallest))
    torch.distributed.all_reduce(everywhere, op=torch.distributed.ReduceOp.MIN)
    return Measured(run, float(everywhere))
