"""Tiny models and batches on which layouts are compared."""

from __future__ import annotations

import torch

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.data import DataConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.config.training import TrainingConfig
from megatron_aha.data.batches import MicroBatch


def tiny_config(
    parallel: ParallelConfig | None = None,
    *,
    zero_stage: int = 0,
    precision: str = "fp32",
    micro_batch_size: int = 1,
    global_batch_size: int = 4,
) -> RunConfig:
    """Returns a run of 2 layers, 4 query heads in 2 KV groups, sequences of 32 tokens and a window of 8.

    The router starts undecided (no bias, large random weight), so that about half of the routes are 1.
    """
    return RunConfig(
        model=ModelConfig(init_std=0.1),
        aha=AHAConfig(window=8, init_bias=0.0, init_std=0.3, loss_coefficient=0.1),
        parallel=parallel or ParallelConfig(),
        data=DataConfig(seq_length=32),
        training=TrainingConfig(
            train_steps=12,
            warmup_steps=4,
            lr=1e-2,
            min_lr=1e-3,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            precision=precision,
            zero_stage=zero_stage,
            clip_grad=0.0,
        ),
    )


def tiny_micro_batches(
    config: RunConfig, step: int, *, dp_rank: int = 0, dp_size: int = 1, masked: bool = True
) -> list[MicroBatch]:
    """Returns one rank's micro-batches of a step: random tokens, two documents a sequence, uneven loss masks.

    The samples of a step depend on the step alone; layouts only cut them differently, as ``BatchSource`` does.

    Args:
        config: vocabulary and batch sizes.
        step: number of the step.
        dp_rank: which part of the global batch.
        dp_size: into how many parts it is cut.
        masked: leave some tokens without loss, a different number in each sample.
    """
    length, size = config.data.seq_length, config.training.micro_batch_size
    generator = torch.Generator().manual_seed(1000 + step)
    samples = config.training.global_batch_size
    rows = torch.randint(config.model.vocab_size, (samples, length + 1), generator=generator)
    borders = torch.randint(1, length, (samples,), generator=generator)
    loss_mask = torch.ones(samples, length)
    if masked:
        for sample in range(samples):
            loss_mask[sample, : 3 * sample] = 0
    mine = range(dp_rank * size, samples, dp_size * size)
    batches = []
    for first in mine:
        chosen = slice(first, first + size)
        starts = torch.arange(size) * length
        cu_seqlens = torch.cat([starts, starts + borders[chosen], torch.tensor([size * length])]).unique()
        batches.append(
            MicroBatch(
                tokens=rows[chosen, :-1].flatten(),
                labels=rows[chosen, 1:].flatten(),
                loss_mask=loss_mask[chosen].flatten(),
                position_ids=torch.arange(length).repeat(size),
                cu_seqlens=cu_seqlens.to(torch.int32),
            )
        )
    return batches
