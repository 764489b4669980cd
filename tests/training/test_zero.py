"""ZeRO stages and precisions: the same curve, whoever holds the optimizer state."""

from __future__ import annotations

import functools

import pytest

from megatron_aha.testing.distributed import run_distributed
from megatron_aha.testing.tiny import tiny_config
from megatron_aha.testing.training import train_tiny

STEPS = 10
# One unit in the last place of bf16: what rounding gradients at other places may move a loss by.
BF16_EPSILON = 2**-8


@functools.cache
def losses(zero_stage: int, precision: str, ranks: int) -> list[float]:
    config = tiny_config(zero_stage=zero_stage, precision=precision)
    return [step.lm_loss for step in run_distributed(train_tiny, ranks, config, STEPS)[0].steps]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_fp32_curve_does_not_depend_on_the_stage(zero_stage: int) -> None:
    assert losses(zero_stage, "fp32", 2) == pytest.approx(losses(0, "fp32", 1), rel=1e-5)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_bf16_curve_follows_fp32(zero_stage: int) -> None:
    bf16 = losses(zero_stage, "bf16", 2)
    assert bf16 == pytest.approx(losses(1, "bf16", 2), rel=BF16_EPSILON)
    assert bf16 == pytest.approx(losses(0, "fp32", 1), rel=BF16_EPSILON)
    assert bf16 != losses(0, "fp32", 1)
