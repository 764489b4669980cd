"""Parameter groups: routers have a rate of their own, and every pipeline stage has as many groups."""

from __future__ import annotations

import pytest

from megatron_aha.config.model import ModelConfig
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.models import build_stage
from megatron_aha.parallel.layout import build_groups
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.testing.tiny import tiny_config
from megatron_aha.training.engine import init_distributed
from megatron_aha.training.optimizer import build_optimizer, set_learning_rates


def groups_of_a_stage() -> list[tuple[str, float, int]]:
    """Returns name, rate at the peak and number of parameters of each group; the first stage has no router."""
    config = tiny_config(ParallelConfig(pipeline_model_parallel_size=2))
    config.model = ModelConfig(family="olmo3", static_window=5, windowed_layers=[0])
    config.aha.lr = config.training.lr / 4
    init_distributed()
    build_groups(config.parallel, config.training.seed)
    model = build_stage(config.model, config.aha, config.parallel, config.training)
    optimizer = build_optimizer(model, config.aha, config.training)
    rates = set_learning_rates(optimizer, config.aha, config.training, config.training.warmup_steps)
    assert rates["router"] == pytest.approx(config.training.lr / 4)  # on both stages
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    return [(group["name"], group["lr"], len(group["params"])) for group in optimizer.param_groups]


def test_rates_and_groups_of_stages_with_and_without_routers() -> None:
    windowed, routed = run_distributed(groups_of_a_stage, 2)
    peak = tiny_config().training.lr
    assert [name for name, _, _ in windowed] == ["matrices", "norms", "norms"]
    assert [name for name, _, _ in routed] == ["matrices", "norms", "router"]
    assert [rate for _, rate, _ in windowed] == pytest.approx([peak] * 3)
    assert [rate for _, rate, _ in routed] == pytest.approx([peak, peak, peak / 4])
