"""The router loss: the same for every layout and every cut of the batch, and its share of the total is exact."""

from __future__ import annotations

import pytest
import torch
from compare import largest_relative_error
from torch import Tensor

from megatron_aha.attention.router import DecideRoutes
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.testing.tiny import tiny_config, tiny_micro_batches
from megatron_aha.testing.training import TinyRun, gather_global, start_tiny, train_tiny

# Large enough that the LM loss is lost in rounding beside it: the gradient is that of the router loss alone.
ROUTER_LOSS_ONLY = 1e12


def router_gradients(config: RunConfig) -> tuple[dict[str, Tensor], float]:
    run = train_tiny(config, 1)
    assert run.steps[0].router is not None
    routers = {name: value for name, value in run.gradients.items() if ".router." in name}
    return routers, run.steps[0].router.router_loss


def config_of(tp: int = 1, sp: bool = False, pp: int = 1, micro: int = 1, samples: int = 4) -> RunConfig:
    config = tiny_config(
        ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sp, pipeline_model_parallel_size=pp),
        micro_batch_size=micro,
        global_batch_size=samples,
    )
    config.aha.loss_coefficient = ROUTER_LOSS_ONLY
    return config


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Tensor], float]:
    return run_distributed(router_gradients, 1, config_of())[0]


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, config_of(tp=2)),
        (2, config_of(tp=2, sp=True)),
        (2, config_of(pp=2)),
        (2, config_of()),
        (1, config_of(micro=2)),
        (1, config_of(micro=4)),
    ],
    ids=["tp2", "tp2-sp", "pp2", "dp2", "2x2", "4x1"],
)
def test_router_loss_knows_neither_layout_nor_batch_shape(
    alone: tuple[dict[str, Tensor], float], ranks: int, config: RunConfig
) -> None:
    gradients, loss = run_distributed(router_gradients, ranks, config)[0]
    assert loss == pytest.approx(alone[1], rel=1e-6)
    error, name = largest_relative_error(gradients, alone[0])
    assert error < 1e-5, name


def test_coefficient_zero_adds_exactly_nothing() -> None:
    logits = torch.randn(5, 3, requires_grad=True)
    route = DecideRoutes.apply(logits, logits.detach() > 0, torch.ones(5), 0.0)
    (route * 0).sum().backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(5, 3))


@pytest.mark.parametrize("route", [0, 1])
@pytest.mark.parametrize("logit", [-20.0, -1e-8, 0.0, 1e-8, 20.0])
def test_straight_through_gradient_is_that_of_the_probability(route: int, logit: float) -> None:
    logits = torch.full((1, 1), logit, requires_grad=True)
    decided = torch.tensor([[bool(route)]])
    loss_mask = torch.ones(1)
    upstream, weight = 3.0, 0.5
    out = DecideRoutes.apply(logits, decided, loss_mask, weight)
    assert out.item() == route
    out.backward(torch.full((1, 1), upstream))
    probability = torch.sigmoid(torch.tensor(logit, dtype=torch.float64))
    slope = probability * torch.sigmoid(torch.tensor(-logit, dtype=torch.float64))
    assert logits.grad is not None
    assert logits.grad.item() == pytest.approx(float((upstream + weight) * slope), rel=1e-6)
    assert logits.grad.item() > 0  # also at 20, where 1 - p would round to 0


def masked_run(all_masked: bool) -> tuple[float, float, float, bool]:
    config = tiny_config()
    engine = start_tiny(config)
    batches = tiny_micro_batches(config, 1)
    for batch in batches if all_masked else batches[1:]:
        batch.loss_mask.zero_()
    result = engine.train_step(1, batches)
    weights = gather_global(engine, lambda parameter: parameter.detach())
    assert result.router is not None
    finite = all(bool(value.isfinite().all()) for value in weights.values())
    return result.lm_loss, result.router.router_loss, result.tokens, finite


def test_batch_without_any_target_has_loss_zero_and_finite_gradients() -> None:
    lm_loss, router_loss, _, finite = run_distributed(masked_run, 1, True)[0]
    assert (lm_loss, router_loss, finite) == (0.0, 0.0, True)


def only_first_sample(padded: bool) -> TinyRun:
    config = tiny_config()
    engine = start_tiny(config)
    batches = tiny_micro_batches(config, 1)
    if padded:
        for batch in batches[1:]:
            batch.loss_mask.zero_()
    else:
        batches = batches[:1] * 4
    return TinyRun([engine.train_step(1, batches)])


def test_tokens_without_loss_count_neither_in_router_loss_nor_in_usage() -> None:
    padded = run_distributed(only_first_sample, 1, True)[0].steps[0]
    repeated = run_distributed(only_first_sample, 1, False)[0].steps[0]
    assert padded.lm_loss == pytest.approx(repeated.lm_loss, rel=1e-6)
    assert padded.router.router_loss == pytest.approx(repeated.router.router_loss, rel=1e-9)
    assert padded.router.usage == pytest.approx(repeated.router.usage, rel=1e-12)
