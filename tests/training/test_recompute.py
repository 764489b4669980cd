"""Activation recompute changes memory, not numbers; a route is decided once."""

from __future__ import annotations

import pytest
import torch
from compare import largest_relative_error

from megatron_aha.attention.packed import pack
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.testing.tiny import tiny_config, tiny_micro_batches
from megatron_aha.testing.training import TinyRun, catch_gradients, start_tiny, train_tiny


def run(recompute: str) -> TinyRun:
    config = tiny_config()
    config.training.recompute = recompute
    return run_distributed(train_tiny, 1, config, 1)[0]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_gives_equal_losses_routes_and_gradients(recompute: str) -> None:
    plain, recomputed = run("none"), run(recompute)
    assert recomputed.steps[0].lm_loss == plain.steps[0].lm_loss
    assert recomputed.steps[0].router.usage == plain.steps[0].router.usage
    assert recomputed.steps[0].router.router_loss == plain.steps[0].router.router_loss
    error, name = largest_relative_error(recomputed.gradients, plain.gradients)
    assert error < 1e-6, name


def step_at_the_threshold(config: RunConfig) -> TinyRun:
    """Trains one step from routers whose logits are 0 and +-1e-8 in every token."""
    engine = start_tiny(config)
    for name, parameter in engine.model.named_parameters():
        if ".router." in name:
            at_zero = torch.tensor([0.0, 1e-8, -1e-8, -0.0])
            parameter.data.copy_(at_zero if name.endswith(".bias") else torch.zeros_like(parameter))
    run = TinyRun()
    catch_gradients(engine, run)
    run.steps.append(engine.train_step(1, tiny_micro_batches(config, 1)))
    return run


def test_logits_at_the_threshold_decide_alike_under_recompute() -> None:
    runs = {}
    for recompute in ("none", "selective", "full"):
        config = tiny_config()
        config.training.recompute = recompute
        runs[recompute] = run_distributed(step_at_the_threshold, 1, config)[0]
        assert runs[recompute].steps[0].router.usage == 0.25  # 1e-8 alone is above 0
    for name in ("selective", "full"):
        assert runs[name].steps[0].lm_loss == runs["none"].steps[0].lm_loss
        error, parameter = largest_relative_error(runs[name].gradients, runs["none"].gradients)
        assert error < 1e-6, parameter


def frozen(recompute: str, ranks: int = 1, zero_stage: int = 0, **parallel: int | bool) -> TinyRun:
    config = tiny_config(ParallelConfig(**parallel), zero_stage=zero_stage)
    config.training.recompute = recompute
    config.training.freeze_model = True
    return run_distributed(train_tiny, ranks, config, 2)[0]


def test_routers_of_a_frozen_model_learn_the_same_under_recompute_and_in_every_layout() -> None:
    plain = frozen("none")
    assert plain.gradients and all(".router." in name for name in plain.gradients)
    sp = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for other in (
        frozen("selective"),
        frozen("full"),
        frozen("full", 2, zero_stage=3),
        frozen("full", 2, **sp),
        frozen("full", 2, zero_stage=1, pipeline_model_parallel_size=2),
    ):
        assert other.steps[1].lm_loss == pytest.approx(plain.steps[1].lm_loss, rel=1e-6)
        error, name = largest_relative_error(other.gradients, plain.gradients)
        assert error < 1e-5, name


def decide_twice(config: RunConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs one layer's decision as recompute does, with logits on the other side of 0 the second time."""
    from megatron_aha.checkpoint.weights import initialise_weights
    from megatron_aha.models import build_model
    from megatron_aha.parallel.layout import build_groups

    build_groups(config.parallel, 1)
    model = build_model(config.model, config.aha, config.parallel, config.training)
    initialise_weights(model, 1)
    attention = model.decoder.layers[0].self_attention
    tokens = 6
    batch = pack(
        torch.arange(tokens),
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.ones(tokens),
        device=torch.device("cpu"),
    )
    states = torch.randn(tokens, 1, config.model.hidden_size)
    with torch.no_grad():
        first = attention.decide(states, batch)
    second = attention.decide(-states, batch)
    return first, second.detach()


def test_the_second_pass_of_a_recomputed_layer_keeps_the_first_pass_s_routes() -> None:
    first, second = run_distributed(decide_twice, 1, tiny_config())[0]
    assert 0 < first.mean() < 1
    assert torch.equal(first, second)
