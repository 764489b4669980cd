"""A step that would harm the model changes nothing, and what follows it is what the options say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.config.training import SPIKE_WINDOW, TrainingConfig
from megatron_aha.data.batches import BatchSource, MicroBatch
from megatron_aha.testing.distributed import RankFailure, run_distributed
from megatron_aha.testing.tiny import tiny_config, tiny_micro_batches
from megatron_aha.testing.training import gather_global, start_tiny
from megatron_aha.training.guard import UpdateGuard
from megatron_aha.training.pretrain import main


def train_steps(config: RunConfig, steps: list[int], bad: int) -> tuple[list[str | None], dict[str, Tensor]]:
    """Trains the given steps; in step ``bad`` one rank's gradient of one router becomes NaN, the loss stays finite."""
    engine = start_tiny(config)
    poison = [False]
    router = dict(engine.model.named_parameters())["decoder.layers.0.self_attention.router.weight"]
    router.register_hook(lambda gradient: gradient * math.nan if poison[0] else gradient)
    faults = []
    for step in steps:
        poison[0] = step == bad and torch.distributed.get_rank() == 0
        batches = tiny_micro_batches(
            config,
            step,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
        )
        faults.append(engine.train_step(step, batches).fault)
    return faults, gather_global(engine, engine.optimizer_state.master)


@pytest.mark.parametrize(
    ("zero_stage", "precision", "pp"),
    [
        (0, "fp32", 1),
        (1, "fp32", 1),
        (2, "fp32", 1),
        (3, "fp32", 1),
        (1, "bf16", 1),
        (3, "bf16", 1),
        (1, "fp32", 2),
    ],
)
def test_nan_gradient_of_one_rank_leaves_weights_and_moments_as_if_the_step_had_not_been(
    zero_stage: int, precision: str, pp: int
) -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=pp)
    config = tiny_config(parallel, zero_stage=zero_stage, precision=precision)
    (_, weights), (faults, _) = run_distributed(train_steps, 2, config, [1, 2, 3], 2)
    assert faults == [None, "the gradient norm is not finite", None]
    _, expected = run_distributed(train_steps, 2, config, [1, 3], 0)[0]
    assert weights.keys() == expected.keys() and len(weights) > 0
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_a_spike_is_a_loss_above_its_multiple_of_the_median_of_good_steps() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    adam = torch.optim.AdamW([weight], lr=1.0)
    guard = UpdateGuard(adam, lambda: 1.0, TrainingConfig(spike_factor=2.0))

    def step(loss: float, norm: float | None = None) -> str | None:
        weight.grad = torch.ones(1)
        guard.expect(loss, norm)
        adam.step()
        return guard.outcome(1.0 if norm is None else norm)

    assert step(90.0) is None  # too early to know what is usual
    assert all(step(3.0) is None for _ in range(SPIKE_WINDOW))
    before = weight.item()
    assert step(6.1) == "the loss 6.1000 is more than 2 times the usual 3.0000"
    assert weight.item() == before
    assert step(5.9) is None
    assert weight.item() != before
    assert step(math.nan) == "the loss is nan"
    assert step(3.0, -1.0) == "the gradient norm is not finite"
    assert list(guard.recent_losses) == [3.0] * (SPIKE_WINDOW - 1) + [5.9]


def damaged_run(options: list[str], steps: set[int]) -> int:
    """Trains on data whose loss mask is NaN in some steps."""
    original = BatchSource.micro_batches

    def micro_batches(self: BatchSource, consumed_samples: int) -> list[MicroBatch]:
        batches = original(self, consumed_samples)
        if consumed_samples // 4 + 1 in steps:
            batches[0].loss_mask[3] = math.nan
        return batches

    BatchSource.micro_batches = micro_batches  # type: ignore[method-assign]
    return main([*options, "--training.eval_interval", "0"])


def bad_steps(folder: Path) -> list[int]:
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    ]
    return [line["step"] for line in lines if line["train/bad_step"]]


def test_stop_names_step_and_cause_and_leaves_the_last_checkpoint(options: list[str], tmp_path: Path) -> None:
    more = "--training.train_steps 4 --checkpoint.save_interval 2 --logging.log_interval 9".split()
    with pytest.raises(RankFailure, match="step 3 was not applied: the loss is nan; the last checkpoint is"):
        run_distributed(damaged_run, 1, [*options, *more], {3})
    assert CheckpointReader(tmp_path / "checkpoints").step == 2
    assert bad_steps(tmp_path) == [3]


def test_skip_goes_on_until_too_many_bad_steps_follow_each_other(options: list[str], tmp_path: Path) -> None:
    more = "--training.train_steps 6 --training.bad_step skip --training.bad_step_limit 2".split()
    assert run_distributed(damaged_run, 2, [*options, *more], {1, 3, 5}) == [0, 0]
    assert bad_steps(tmp_path) == [1, 3, 5]
    again = [*options, *more, "--checkpoint.directory", str(tmp_path / "other")]
    with pytest.raises(RankFailure, match="step 4 was not applied.*bad_step_limit 2 bad steps in a row"):
        run_distributed(damaged_run, 1, again, {3, 4})


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_rollback_takes_weights_and_moments_of_the_last_checkpoint_and_the_next_data(
    options: list[str], tmp_path: Path, zero_stage: int
) -> None:
    more = f"--training.bad_step rollback --checkpoint.save_interval 3 --training.zero_stage {zero_stage}"
    more += " --training.train_steps 5"
    assert run_distributed(damaged_run, 2, [*options, *more.split()], {5}) == [0, 0]
    before = CheckpointReader(tmp_path / "checkpoints" / "step_00000003")
    after = CheckpointReader(tmp_path / "checkpoints" / "step_00000005")
    names = [name for name in before.names() if not name.startswith("rng.")]
    assert [name for name in names if not torch.equal(before.read(name), after.read(name))] == []
    assert before.state is not None and after.state is not None
    assert (after.state["step"], after.state["consumed_samples"]) == (5, 20)
    assert after.state["adam_steps"] == before.state["adam_steps"] == 3
    assert bad_steps(tmp_path) == [5]


def test_rollback_trains_on_from_there(options: list[str], tmp_path: Path) -> None:
    more = "--training.bad_step rollback --checkpoint.save_interval 2 --training.train_steps 4".split()
    assert run_distributed(damaged_run, 1, [*options, *more], {3}) == [0]
    two, four = (CheckpointReader(tmp_path / "checkpoints" / f"step_0000000{step}") for step in (2, 4))
    assert four.state is not None and four.state["adam_steps"] == 3
    assert all(not torch.equal(two.read(name), four.read(name)) for name in two.weight_names())


def test_rollback_without_a_checkpoint_says_so(options: list[str]) -> None:
    more = "--training.bad_step rollback --checkpoint.save_interval 2 --training.train_steps 4".split()
    with pytest.raises(RankFailure, match="holds no checkpoint to go back to yet"):
        run_distributed(damaged_run, 1, [*options, *more], {1})
