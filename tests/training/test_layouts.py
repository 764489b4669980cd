"""Every layout trains to the numbers of one process: losses, router statistics, gradients, gradient norm."""

from __future__ import annotations

import functools

import pytest
from compare import largest_relative_error

from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.testing.tiny import tiny_config
from megatron_aha.testing.training import TinyRun, train_tiny

# name: (ranks, tensor parallel, sequence parallel, pipeline parallel, ZeRO stage)
LAYOUTS = {
    "tp2": (2, 2, False, 1, 0),
    "tp2-sp": (2, 2, True, 1, 0),
    "dp2": (2, 1, False, 1, 0),
    "tp4-sp": (4, 4, True, 1, 0),  # more tensor-parallel ranks than KV groups
    "pp2": (2, 1, False, 2, 0),
    "tp2-sp-dp2-zero3": (4, 2, True, 1, 3),
    "tp2-sp-pp2-zero1": (4, 2, True, 2, 1),
}


def run(
    ranks: int, tp: int, sp: bool, pp: int, zero: int, *, tied: bool = True, steps: int = 1, clip: float = 0.0
) -> TinyRun:
    config = tiny_config(
        ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, sequence_parallel=sp),
        zero_stage=zero,
    )
    config.model.tied_embeddings = tied
    config.training.clip_grad = clip
    return run_distributed(train_tiny, ranks, config, steps)[0]


@functools.cache
def one_process(tied: bool = True, steps: int = 1, clip: float = 0.0) -> TinyRun:
    return run(1, 1, False, 1, 0, tied=tied, steps=steps, clip=clip)


def assert_same_statistics(actual: TinyRun, expected: TinyRun) -> None:
    for mine, theirs in zip(actual.steps, expected.steps, strict=True):
        assert mine.lm_loss == pytest.approx(theirs.lm_loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        assert mine.tokens == theirs.tokens
        assert mine.router is not None and theirs.router is not None
        assert mine.router.router_loss == pytest.approx(theirs.router.router_loss, rel=1e-5)
        assert mine.router.usage == theirs.router.usage
        assert mine.router.usage_beyond_window == theirs.router.usage_beyond_window


def test_the_routes_of_the_tiny_model_are_mixed() -> None:
    router = one_process().steps[0].router
    assert router is not None
    assert 0.2 < router.usage < 0.8
    assert 0.2 < router.usage_beyond_window < 0.8


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_step_equals_one_process(layout: str, tied: bool) -> None:
    expected = one_process(tied)
    actual = run(*LAYOUTS[layout], tied=tied)
    assert_same_statistics(actual, expected)
    error, name = largest_relative_error(actual.gradients, expected.gradients)
    assert error < 1e-5, name


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_replicated_parameters_stay_equal_over_five_steps(zero: int) -> None:
    expected = one_process(steps=5)
    actual = run(2, 2, True, 1, zero, steps=5)
    assert_same_statistics(actual, expected)
    error, name = largest_relative_error(actual.weights, expected.weights)
    assert error < 1e-4, name
    norms = {name: value for name, value in expected.weights.items() if "norm" in name or "router" in name}
    error, name = largest_relative_error({name: actual.weights[name] for name in norms}, norms)
    assert error < 1e-4, name


@pytest.mark.parametrize(
    "layout", [(2, 2, True, 1, 0), (2, 2, True, 1, 1), (2, 1, False, 2, 0), (4, 2, True, 2, 1)], ids=str
)
def test_clipped_update_does_not_depend_on_the_layout(layout: tuple[int, int, bool, int, int]) -> None:
    expected = one_process(steps=2, clip=0.1)
    assert expected.steps[0].grad_norm > 1  # clipping at 0.1 does something
    actual = run(*layout, steps=2, clip=0.1)
    assert_same_statistics(actual, expected)
    error, name = largest_relative_error(actual.weights, expected.weights)
    assert error < 1e-5, name
