"""Sampled router gradients over packed documents: each document draws for itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_aha.attention.core import AHACoreAttention
from megatron_aha.attention.packed import pack
from megatron_aha.config.aha import AHAConfig
from megatron_aha.parallel.layout import single_process

LENGTH = 64


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with single_process():
        yield


def route_gradients(router_grad: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients by the routes ``[tokens, heads]`` of two documents of the same values."""
    core = AHACoreAttention(None, AHAConfig(window=4, router_grad=router_grad), layer_number=1)
    borders = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32)
    batch = pack(
        torch.arange(2 * LENGTH),
        borders,
        torch.ones(2 * LENGTH),
        device=torch.device("cpu"),
        router_seed=seed,
    )
    torch.manual_seed(0)
    query, key, value, upstream = (torch.randn(LENGTH, 2, 8).repeat(2, 1, 1) for _ in range(4))
    route = torch.zeros(2 * LENGTH, 2, requires_grad=True)
    core(query, key, value, route, batch).backward(upstream)
    assert route.grad is not None
    first, second = route.grad.split(LENGTH)
    return first, second


def test_two_equal_documents_of_a_row_draw_different_tokens() -> None:
    first, second = route_gradients("exact")
    torch.testing.assert_close(first, second)
    first, second = route_gradients("sampled:0.5")
    # Half of each is drawn, independently: they agree in about half of the tokens beyond the window.
    agree = ((first != 0) == (second != 0))[4:].float().mean()
    assert 0.35 < agree < 0.65


def test_a_document_s_draws_follow_the_number_of_its_first_token() -> None:
    _, second = route_gradients("sampled:0.5")
    first, _ = route_gradients("sampled:0.5", seed=LENGTH)
    torch.testing.assert_close(first, second)
