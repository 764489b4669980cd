"""The arithmetic between sequences, ranks and steps."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_aha.config.rules.layout import model_parallel_size
from megatron_aha.config.run import RunConfig


@dataclass
class BatchArithmetic:
    """How the global batch falls on the ranks.

    Args:
        world_size: all ranks.
        data_parallel_size: copies of the model.
        accumulation_steps: micro-batches of each copy per optimizer step.
        tokens_per_step: over all ranks.
        total_tokens: of the whole run.
    """

    world_size: int
    data_parallel_size: int
    accumulation_steps: int
    tokens_per_step: int
    total_tokens: int


def expected_world_size(config: RunConfig) -> int:
    """Returns the ranks of the run, before it has started.

    That is nodes x ranks per node when both are stated, else what the launcher says, else the fewest that
    hold the model.
    """
    nodes, per_node = config.parallel.nodes, config.parallel.ranks_per_node
    if nodes is not None and per_node is not None:
        return nodes * per_node
    launched = os.environ.get("WORLD_SIZE")
    return int(launched) if launched else model_parallel_size(config)


def batch_arithmetic(config: RunConfig, world_size: int) -> BatchArithmetic:
    """Returns the arithmetic of a layout that divides, rounded down where it does not."""
    training = config.training
    data_parallel_size = max(world_size // model_parallel_size(config), 1)
    per_step = training.global_batch_size * config.data.seq_length
    return BatchArithmetic(
        world_size=world_size,
        data_parallel_size=data_parallel_size,
        accumulation_steps=training.global_batch_size // (training.micro_batch_size * data_parallel_size),
        tokens_per_step=per_step,
        total_tokens=per_step * training.train_steps,
    )
