"""fp16 under DeepSpeed's own dynamic loss scale: every gradient, the router's too, follows it.

DeepSpeed refuses fp16 where the CPU has no fast fp16; PyTorch computes it all the same, so the tests lift that.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.errors import UserError
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.testing.tiny import tiny_config
from megatron_aha.testing.training import TinyRun, gather_global, start_tiny, train_tiny
from megatron_aha.training.engine import TrainingEngine
from megatron_aha.training.pretrain import main

TOLERANCE = 2**-8  # a few units in the last place of fp16, 2**-11


def fp16_config(parallel: ParallelConfig | None = None, zero_stage: int = 1, **scale: Any) -> RunConfig:
    config = tiny_config(parallel, zero_stage=zero_stage, precision="fp16")
    # far above the loss of the language model, so that a router loss of another scale cannot hide
    config.aha.loss_coefficient = 10.0
    # small steps: other weights would decide some routes otherwise
    config.training.lr, config.training.min_lr = 1e-6, 1e-7
    config.training.train_steps = 6
    config.training.deepspeed = {"fp16": {"hysteresis": 1, **scale}}
    return config


def allow_fp16() -> None:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def train(config: RunConfig) -> tuple[TinyRun, dict[str, Tensor]]:
    """Returns a tiny run and Adam's first moments after it, which hold the gradients of all steps."""
    allow_fp16()
    moments: dict[str, Tensor] = {}
    close = TrainingEngine.close

    def close_after_reading(engine: TrainingEngine) -> None:
        moments.update(gather_global(engine, lambda weight: engine.optimizer_state.moment(weight, "exp_avg")))
        close(engine)

    TrainingEngine.close = close_after_reading  # type: ignore[method-assign]
    return train_tiny(config, config.training.train_steps), moments


@functools.cache
def in_fp32() -> tuple[TinyRun, dict[str, Tensor]]:
    config = fp16_config()
    config.training.precision, config.training.deepspeed = "fp32", {}
    return run_distributed(train, 1, config)[0]


def errors(found: dict[str, Tensor], exact: dict[str, Tensor], scale: float) -> float:
    """Returns the largest relative difference of a tensor divided by a scale."""
    assert set(found) == set(exact)
    return max(float((found[name] / scale - value).norm() / value.norm()) for name, value in exact.items())


LAYOUTS = [
    (None, 1, 1),
    (None, 2, 2),
    (None, 3, 2),
    (ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True), 1, 2),
    (ParallelConfig(pipeline_model_parallel_size=2), 1, 2),
]


@pytest.mark.parametrize(("parallel", "zero_stage", "ranks"), LAYOUTS)
def test_gradients_follow_fp32_while_the_scale_grows(
    parallel: ParallelConfig | None, zero_stage: int, ranks: int
) -> None:
    config = fp16_config(parallel, zero_stage, initial_scale_power=6, loss_scale_window=1)
    run, moments = run_distributed(train, ranks, config)[0]
    expected, expected_moments = in_fp32()
    scales = [step.loss_scale for step in run.steps]
    assert scales[0] == 2**6 and scales[-1] >= 2**8, scales
    for quantity in ("lm_loss", "grad_norm"):
        found = [getattr(step, quantity) for step in run.steps]
        assert found == pytest.approx([getattr(step, quantity) for step in expected.steps], rel=TOLERANCE)
    assert len([name for name in expected.gradients if "router" in name]) == 4
    assert errors(run.gradients, expected.gradients, scales[-1]) < TOLERANCE
    # In some of the steps a route within rounding of its threshold is decided otherwise. Gradients divided by the
    # wrong scale in one of them are off by a tenth and more.
    assert errors(moments, expected_moments, 1.0) < 0.02


def test_an_overflow_drops_the_step_lowers_the_scale_and_is_no_bad_step() -> None:
    config = fp16_config(initial_scale_power=24, loss_scale_window=100)
    config.training.bad_step, config.training.train_steps = "stop", 14
    steps = run_distributed(train, 2, config)[0][0].steps
    dropped, scales = [step.overflowed for step in steps], [step.loss_scale for step in steps]
    assert scales[0] == 2.0**24 and dropped[:3] == [True] * 3 and dropped[-3:] == [False] * 3
    halved = [scale / 2 if overflow else scale for scale, overflow in zip(scales, dropped, strict=True)]
    assert scales[1:] == halved[:-1]
    assert all(step.fault is None for step in steps)


def fp16_main(options: list[str]) -> int:
    allow_fp16()
    return main(options)


def test_a_resumed_run_goes_on_at_the_scale_it_had(options: list[str], tmp_path: Path) -> None:
    fp16 = "--training.precision fp16 --training.zero_stage 1 --training.eval_interval 0".split()
    fp16 += ["--training.deepspeed.fp16", "{initial_scale_power: 5, loss_scale_window: 2, hysteresis: 1}"]
    whole = [*options, *fp16, "--training.train_steps", "6", "--checkpoint.save_interval", "3"]
    unbroken = [*whole, "--checkpoint.directory", str(tmp_path / "unbroken")]
    assert run_distributed(fp16_main, 2, unbroken) == [0, 0]
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "unbroken", resumed)
    shutil.rmtree(resumed / "step_00000006")
    (resumed / "latest").write_text("step_00000003\n")
    assert run_distributed(fp16_main, 2, [*whole, "--checkpoint.directory", str(resumed)]) == [0, 0]
    one, other = (CheckpointReader(tmp_path / name) for name in ("unbroken", "resumed"))
    assert one.step == other.step == 6
    assert one.state == other.state and one.state is not None
    assert one.state["loss_scale"]["cur_scale"] > 2**5
    assert [name for name in one.names() if not torch.equal(one.read(name), other.read(name))] == []


def refused() -> str:
    with pytest.raises(UserError) as caught:
        start_tiny(fp16_config())
    return str(caught.value)


def test_a_device_without_fp16_says_so() -> None:
    if torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("this device has fp16")
    assert run_distributed(refused, 1) == [
        "--training.precision fp16 cannot run on this cpu; use bf16 or fp32"
    ]
