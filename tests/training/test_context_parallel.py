"""Context parallelism beyond the table of layouts: two sequences a row, sinks, a dense model, sampled router gradients,
evaluation, traffic.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import largest_relative_error
from megatron.core import parallel_state

from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.testing.tiny import tiny_config, tiny_micro_batches
from megatron_aha.testing.training import start_tiny, train_tiny


def config_of(size: int, kind: str, *, tp: int = 1) -> RunConfig:
    parallel = ParallelConfig(context_parallel_size=size, tensor_model_parallel_size=tp)
    config = tiny_config(parallel, micro_batch_size=1 if kind == "four ranks" else 2)
    config.aha.num_sink_tokens = 2 if kind == "sinks" else 0
    config.aha.enabled = kind != "dense"
    if kind == "sampled":
        config.aha.router_grad = "sampled:0.3"
    return config


@pytest.mark.parametrize(("kind", "ranks"), [("sinks", 2), ("dense", 2), ("four ranks", 4)])
def test_a_step_equals_that_of_one_process(kind: str, ranks: int) -> None:
    expected = run_distributed(train_tiny, 1, config_of(1, kind), 1)[0]
    actual = run_distributed(train_tiny, ranks, config_of(ranks, kind), 1)[0]
    for mine, theirs in zip(actual.steps, expected.steps, strict=True):
        assert mine.lm_loss == pytest.approx(theirs.lm_loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        assert mine.tokens == theirs.tokens
        if theirs.router is not None:
            assert mine.router is not None and mine.router.usage == theirs.router.usage
    error, name = largest_relative_error(actual.gradients, expected.gradients)
    assert error < 1e-5, name


def second_step(configs: list[RunConfig]) -> list[dict[str, torch.Tensor]]:
    """Returns the gradients of each run's second step."""
    return [train_tiny(config, 2).gradients for config in configs]


def test_sampled_router_gradients_draw_the_same_tokens_in_every_layout() -> None:
    alone, one_by_one = config_of(1, "sampled"), config_of(1, "sampled")
    one_by_one.training.micro_batch_size = 1
    exact = config_of(1, "sinks")
    exact.aha.num_sink_tokens = 0
    expected, *others = run_distributed(second_step, 1, [alone, one_by_one, exact])[0]
    layouts = {"one sample at a time": others[0]}
    layouts["cp2"], layouts["dp2"] = run_distributed(second_step, 2, [config_of(2, "sampled"), alone])[0]
    both = [config_of(2, "sampled", tp=2), config_of(2, "sampled")]
    layouts["cp2-tp2"], layouts["cp2-dp2"] = run_distributed(second_step, 4, both)[0]
    for layout, gradients in layouts.items():
        error, name = largest_relative_error(gradients, expected)
        assert error < 1e-5, (layout, name)
    assert largest_relative_error(others[1], expected)[0] > 0.1  # not drawn at all


def evaluated(config: RunConfig) -> tuple[float, float]:
    engine = start_tiny(config)
    result = engine.evaluate([tiny_micro_batches(config, 1), tiny_micro_batches(config, 2)])
    assert result.router is not None
    return result.lm_loss, result.router.usage_beyond_window


def test_an_evaluation_equals_that_of_one_process() -> None:
    alone = run_distributed(evaluated, 1, config_of(1, "sinks"))[0]
    for loss, usage in run_distributed(evaluated, 2, config_of(2, "sinks")):
        assert loss == pytest.approx(alone[0], rel=1e-6)
        assert usage == alone[1]


def traffic(config: RunConfig) -> list[tuple[str, int]]:
    """Returns kind and bytes received of every collective over the context group in one micro-batch's two passes."""
    engine = start_tiny(config)
    group = parallel_state.get_context_parallel_group()
    seen: list[tuple[str, int]] = []

    def count(name: str, function: Any) -> Any:
        def counted(output: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is group:
                whole = max(output.nbytes, source.nbytes)
                seen.append((name, whole * (group.size() - 1) // group.size()))
            return function(output, source, *args, **kwargs)

        return counted

    from megatron.core.tensor_parallel import mappings

    mappings.dist_all_gather_func = count("gather", mappings.dist_all_gather_func)
    mappings.dist_reduce_scatter_func = count("scatter", mappings.dist_reduce_scatter_func)
    engine.train_step(1, tiny_micro_batches(config, 1)[:1])
    return seen


@pytest.mark.parametrize(("recompute", "gathers"), [("none", 1), ("selective", 1), ("full", 2)])
def test_bytes_moved_per_layer_are_what_the_documentation_says(recompute: str, gathers: int) -> None:
    config = tiny_config(ParallelConfig(context_parallel_size=2), global_batch_size=1)
    config.training.recompute = recompute
    seen = run_distributed(traffic, 2, config)[0]
    model = config.model
    # (size - 1) / size x tokens x (keys and values) x groups x head_dim x 4 bytes
    once = config.data.seq_length * 2 * model.num_query_groups * model.head_dim * 4 // 2
    per_layer = [("gather", once)] * gathers + [("scatter", once)]
    assert sorted(seen) == sorted(per_layer * model.num_layers)
