"""Which keys a token sees in training: the window counts the token itself, and no path forgets it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_aha.attention.core import AHACoreAttention
from megatron_aha.attention.packed import PackedBatch, pack
from megatron_aha.checkpoint.weights import initialise_weights
from megatron_aha.config.aha import AHAConfig
from megatron_aha.models import build_model
from megatron_aha.models.gpt import AHAGPTModel
from megatron_aha.parallel.layout import single_process
from megatron_aha.testing.tiny import tiny_config

LENGTH = 32


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with single_process():
        yield


def packed(borders: list[int]) -> PackedBatch:
    return pack(
        torch.arange(borders[-1]),
        torch.tensor(borders, dtype=torch.int32),
        torch.ones(borders[-1]),
        device=torch.device("cpu"),
    )


def visible_keys(window: int, route: float, borders: list[int]) -> torch.Tensor:
    """Returns which keys have a weight above 0, bool ``[queries, keys]``: values are one-hot, so weights come out."""
    core = AHACoreAttention(build_config(), AHAConfig(window=window), layer_number=1)
    torch.manual_seed(0)
    query, key = torch.randn(2, LENGTH, 1, LENGTH)
    value = torch.eye(LENGTH).unsqueeze(1)
    weights = core(query, key, value, torch.full((LENGTH, 1), route), packed(borders))
    return weights.squeeze(1) > 0


def build_config() -> object:
    return build(window=8).config


def build(window: int, num_layers: int = 2) -> AHAGPTModel:
    config = tiny_config()
    config.aha.window = window
    config.aha.init_bias, config.aha.init_std = -1.0, 0.0  # all routes 0
    config.model.num_layers = num_layers
    model = build_model(config.model, config.aha, config.parallel, config.training)
    initialise_weights(model, 1)
    return model


@pytest.mark.parametrize("window", [1, 2, 8, 31, 32, 33])
def test_here_sees_the_last_keys_and_all_sees_every_key(window: int) -> None:
    rows, columns = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
    causal = columns <= rows
    assert torch.equal(visible_keys(window, 0.0, [0, LENGTH]), causal & (columns > rows - window))
    assert torch.equal(visible_keys(window, 1.0, [0, LENGTH]), causal)


@pytest.mark.parametrize("route", [0.0, 1.0])
def test_neither_path_crosses_a_document(route: float) -> None:
    borders = [0, 1, 12, LENGTH]
    document = torch.bucketize(torch.arange(LENGTH), torch.tensor(borders[1:]), right=True)
    seen = visible_keys(8, route, borders)
    assert not (seen & (document[:, None] != document[None, :])).any()
    assert seen.diagonal().all()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_token_outside_the_window_changes_nothing(training: bool) -> None:
    window = 8
    model = build(window, num_layers=1).train(training)
    tokens = torch.randint(301, (LENGTH,), generator=torch.Generator().manual_seed(2))
    changed = tokens.clone()
    changed[3] = (changed[3] + 1) % 301
    before, after = (model.logits(row, packed([0, LENGTH])) for row in (tokens, changed))
    different = (before != after).any(dim=1)
    assert different[3 : 3 + window].all()
    assert not different[:3].any()
    assert not different[3 + window :].any()
