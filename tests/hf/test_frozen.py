"""Frozen routers: their heads see their window only, and a cache drops what static groups cannot see again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import WINDOW, make_aha, make_family, random_tokens, set_routes
from torch import Tensor

from megatron_aha.errors import UserError
from megatron_aha.hf.configuration import read_config
from megatron_aha.hf.exported.cache_aha import SplitLayer
from megatron_aha.hf.exported.configuration_llama_aha import LlamaAHAConfig
from megatron_aha.hf.exported.kernels_aha import KERNELS
from megatron_aha.hf.exported.modeling_aha import CACHE_FIELD

ATTENTIONS = ("eager", "sdpa", KERNELS)
# heads 0 and 1 share a group, as do 2 and 3: layer 0 keeps a half group, layer 1 is static as a whole
FROZEN = [[0, 1, 2], [0, 1, 2, 3]]
TOLERANCE = 1e-5


def assert_equal(ours: Tensor, expected: Tensor) -> None:
    assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()


def closed(attention: str, frozen: list[list[int]]) -> Any:
    """Returns the model in which the same heads say *here* by themselves: no cache drops anything."""
    model = make_aha(attention)
    for layer, routers in zip(model.model.layers, frozen, strict=True):
        layer.self_attn.router.weight.data[routers] = 0.0
        layer.self_attn.router.bias.data[routers] = -1.0
    return model


def in_pieces(
    model: Any, tokens: Tensor, pieces: list[int], mask: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Returns the logits of a pass through a cache, and the cache."""
    cache, parts, seen = None, [], 0
    for part in tokens.split(pieces, dim=1):
        seen += part.shape[1]
        given: dict[str, Any] = {} if cache is None else {CACHE_FIELD: cache}
        if mask is not None:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, seen - part.shape[1] : seen]
            given |= {"attention_mask": mask[:, :seen], "position_ids": positions}
        output = model(part, use_cache=True, **given)
        cache = getattr(output, CACHE_FIELD)
        parts.append(output.logits)
    return torch.cat(parts, dim=1), cache


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_frozen_heads_see_their_window_in_every_way_of_computing(attention: str) -> None:
    model, expected = make_aha(attention, aha_frozen_routers=FROZEN), closed("eager", FROZEN)
    tokens = random_tokens(2, 40)
    wanted = expected(tokens, use_cache=False).logits
    assert_equal(model(tokens, use_cache=False).logits, wanted)
    for pieces in ([40], [25, 15], [3] * 13 + [1], [1] * 40):
        found, cache = in_pieces(model, tokens, pieces)
        assert_equal(found, wanted)
        assert all(isinstance(layer, SplitLayer) for layer in cache.layers)
    usual = make_aha(attention)(tokens).logits
    assert (usual - wanted).abs().max() > 1e-2 * wanted.abs().max()


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_left_padding_through_a_split_cache(attention: str) -> None:
    model, expected = make_aha(attention, aha_frozen_routers=FROZEN), closed("eager", FROZEN)
    tokens = random_tokens(2, 32)
    mask = torch.ones_like(tokens)
    tokens[1, :7], mask[1, :7] = 0, 0
    real = mask.bool()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    wanted = expected(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for pieces in ([20, 12], [20] + [1] * 12):
        found, _ = in_pieces(model, tokens, pieces, mask)
        assert_equal(found[real], wanted[real])


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("cache", [{"use_cache": True}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("beams", [1, 3])
def test_generating_equals_heads_that_close_by_themselves(attention: str, cache: dict, beams: int) -> None:
    model, expected = make_aha(attention, aha_frozen_routers=FROZEN), closed("eager", FROZEN)
    tokens = random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    tokens[0, :6], mask[0, :6] = 0, 0
    options = {"attention_mask": mask, "do_sample": False, "num_beams": beams, "min_new_tokens": 16}
    wanted = expected.generate(tokens, max_new_tokens=16, use_cache=False, **options)
    assert torch.equal(model.generate(tokens, max_new_tokens=16, **cache, **options), wanted)
    assert len(wanted[0, 20:].unique()) > 5


@torch.no_grad()
def test_the_cache_holds_the_window_of_static_groups_only() -> None:
    model = make_aha(aha_frozen_routers=FROZEN)
    _, cache = in_pieces(model, random_tokens(1, 40), [30, 10])
    first, second = cache.layers
    assert (first.static, second.static) == ([0], [0, 1])
    assert first.keys.shape == (1, 1, 40, 16) and first.near_keys.shape == (1, 1, WINDOW - 1, 16)
    assert second.keys.shape == (1, 0, 40, 16) and second.near_values.shape == (1, 2, WINDOW - 1, 16)
    assert first.near_keys.untyped_storage().nbytes() == first.near_keys.nbytes
    assert cache.get_seq_length() == 40
    with pytest.raises(ValueError, match="cannot be cropped"):
        first.crop(-1)


@torch.no_grad()
def test_usage_of_frozen_heads_is_zero_and_attentions_are_whole() -> None:
    model = make_aha("eager", aha_frozen_routers=FROZEN)
    set_routes(model, "all")
    tokens = random_tokens(1, 20)
    output = model(tokens, output_router_stats=True)
    assert output.router_usage.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    cached, plain = (model(tokens, use_cache=use, output_attentions=True).attentions for use in (True, False))
    for one, other in zip(cached, plain, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_training_gives_frozen_routers_no_gradient_and_the_others_theirs() -> None:
    tokens = random_tokens(2, 24)
    model = make_aha(aha_frozen_routers=[[0], []], aha_loss_coefficient=0.5).train()
    model(tokens, labels=tokens).loss.backward()
    gradients = [layer.self_attn.router.weight.grad for layer in model.model.layers]
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert not gradients[0][0].any() and gradients[0][1:].abs().sum() > 0 and gradients[1][0].abs().sum() > 0


@torch.no_grad()
def test_with_sinks_nothing_is_dropped_and_with_group_routers_a_router_is_a_group() -> None:
    tokens = random_tokens(1, 30)
    sinks = make_aha(aha_num_sink_tokens=2, aha_frozen_routers=FROZEN)
    _, cache = in_pieces(sinks, tokens, [30])
    assert not any(isinstance(layer, SplitLayer) for layer in cache.layers)
    grouped = make_aha(aha_granularity="kv_group", aha_frozen_routers=[[1], []])
    found, cache = in_pieces(grouped, tokens, [20, 10])
    assert cache.layers[0].static == [1] and not isinstance(cache.layers[1], SplitLayer)
    assert_equal(found, grouped(tokens, use_cache=False).logits)


@torch.no_grad()
def test_layers_with_a_static_window_stay_as_they_are() -> None:
    model = make_family("olmo3", True, aha_frozen_routers=[[], [], [], [0, 1]])
    tokens = random_tokens(1, 30)
    found, cache = in_pieces(model, tokens, [20] + [1] * 10)
    assert_equal(found, model(tokens, use_cache=False).logits)
    assert [isinstance(layer, SplitLayer) for layer in cache.layers] == [False, False, False, True]


def test_settings_without_a_meaning_and_imports_are_refused() -> None:
    with pytest.raises(ValueError, match="aha_frozen_routers must hold a list of routers for each layer"):
        LlamaAHAConfig(aha_frozen_routers=[1, 2])
    config = make_aha(aha_frozen_routers=FROZEN).config.to_dict() | {"architectures": ["LlamaAHAForCausalLM"]}
    with pytest.raises(UserError, match="aha_frozen_routers = .* is not supported"):
        read_config(config)
