"""ZeRO stages and precisions: the same curve, whoever holds the optimizer state."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron_aha.testing.distributed import run_distributed
from megatron_aha.testing.tiny import tiny_config, tiny_micro_batches
from megatron_aha.testing.training import TinyRun, catch_gradients, start_tiny, train_tiny

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


def with_and_without_offload(zero_stages: list[int]) -> list[tuple[list[float], list[float]]]:
    """Returns the losses of each stage with the optimizer on the device and moved to the CPU's memory."""
    found = []
    for zero_stage in zero_stages:
        config = tiny_config(zero_stage=zero_stage, precision="bf16")
        stays = [step.lm_loss for step in train_tiny(config, 4).steps]
        config.training.deepspeed = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
        found.append((stays, [step.lm_loss for step in train_tiny(config, 4).steps]))
    return found


def test_offloading_the_optimizer_changes_no_loss() -> None:
    for stays, offloaded in run_distributed(with_and_without_offload, 2, [1, 2, 3])[0]:
        assert offloaded == stays
        assert stays[3] != stays[0]


def gradients_of_copies(copies: int, zero_stage: int, fp32_gradients: bool) -> dict[str, torch.Tensor]:
    """Returns the gradients of a step whose micro-batches are copies of one."""
    config = tiny_config(zero_stage=zero_stage, precision="bf16", global_batch_size=copies)
    config.training.fp32_gradients = fp32_gradients
    engine = start_tiny(config)
    run = TinyRun()
    catch_gradients(engine, run)
    engine.train_step(1, tiny_micro_batches(tiny_config(), 1)[:1] * copies)
    return run.gradients


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_fp32_gradients_of_16_copies_add_up_exactly_under_bf16(zero_stage: int) -> None:
    one = run_distributed(gradients_of_copies, 1, 1, zero_stage, True)[0]
    exact = run_distributed(gradients_of_copies, 1, 16, zero_stage, True)[0]
    rounded = run_distributed(gradients_of_copies, 1, 16, zero_stage, False)[0]
    # A power of two scales without rounding, and 16 equal bf16 numbers have a sum that fp32 holds.
    assert [name for name, value in one.items() if not torch.equal(exact[name], value)] == []
    assert not all(torch.equal(rounded[name], value) for name, value in one.items())
