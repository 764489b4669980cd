"""Usage and router loss, counted by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_aha.attention.packed import pack
from megatron_aha.attention.self_attention import AHASelfAttention
from megatron_aha.attention.tracker import UsageTracker
from megatron_aha.config.aha import AHAConfig
from megatron_aha.models import build_model
from megatron_aha.parallel.layout import single_process
from megatron_aha.testing.tiny import tiny_config


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with single_process():
        yield


def layer(aha: AHAConfig) -> AHASelfAttention:
    """Returns an attention layer whose logits are the first four numbers of each state: identity as router weight."""
    config = tiny_config()
    config.aha = aha
    model = build_model(config.model, config.aha, config.parallel, config.training)
    attention = model.decoder.layers[0].self_attention
    with torch.no_grad():
        attention.router.weight.copy_(torch.eye(attention.router.num_routers, 64))
    return attention


def test_means_over_tokens_with_loss_and_over_those_with_a_key_beyond_their_window() -> None:
    attention = layer(AHAConfig(window=2, bias=False))
    tracker = UsageTracker(2, 4, torch.device("cpu"))
    # Documents of 1 and 4 tokens: tokens 3 and 4 have a key beyond a window of 2. Token 4 carries no loss.
    batch = pack(
        torch.arange(5),
        torch.tensor([0, 1, 5], dtype=torch.int32),
        torch.tensor([1.0, 1, 1, 1, 0]),
        device=torch.device("cpu"),
        tracker=tracker,
    )
    states = torch.zeros(5, 1, 64)
    states[:, 0, :4] = torch.tensor(
        [[9.0, -9, 0, -9], [-9, -9, 0, -9], [9, -9, 0, -9], [9, 9, 0, -9], [9, 9, 9, 9]]
    )
    route = attention.eval().decide(states, batch)
    assert route.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    statistics = tracker.reduce()
    assert statistics.usage_per_head[0].tolist() == [0.75, 0.25, 0, 0]
    assert statistics.usage_beyond_window_per_head[0].tolist() == [1, 1, 0, 0]  # token 3 alone
    assert statistics.usage == pytest.approx(4 / 16)
    assert statistics.usage_beyond_window == pytest.approx(2 / 4)
    high, low = torch.sigmoid(torch.tensor([9.0, -9.0], dtype=torch.float64)).tolist()
    assert statistics.router_loss == pytest.approx((4 * high + 8 * low + 4 * 0.5) / 16)
    assert tracker.reduce().usage == 0  # starts again


def test_sinks_are_not_beyond_the_window() -> None:
    attention = layer(AHAConfig(window=2, num_sink_tokens=1, bias=False))
    tracker = UsageTracker(2, 4, torch.device("cpu"))
    batch = pack(
        torch.arange(5),
        torch.tensor([0, 5], dtype=torch.int32),
        torch.ones(5),
        device=torch.device("cpu"),
        tracker=tracker,
    )
    states = torch.zeros(5, 1, 64)
    states[2, 0, 0] = 1.0  # keys 0 (a sink) and 1, 2 (the window): none is left
    attention.eval().decide(states, batch)
    statistics = tracker.reduce()
    assert statistics.usage == pytest.approx(1 / 20)
    assert statistics.usage_beyond_window == 0


def test_one_route_per_kv_group_serves_its_query_heads() -> None:
    attention = layer(AHAConfig(window=2, granularity="kv_group", bias=False))
    assert attention.router.weight.shape == (2, 64)
    batch = pack(
        torch.arange(6), torch.tensor([0, 6], dtype=torch.int32), torch.ones(6), device=torch.device("cpu")
    )
    states = torch.zeros(6, 1, 64)
    states[:, 0, 1] = 1.0
    query, key, value = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    seen: list[torch.Tensor] = []
    attention.core_attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[3]))
    attention.attend(states, query, key, value, batch)
    assert seen[0].tolist() == [[0, 0, 1, 1]] * 6
