"""Exported models with the package aha_kernels: the same numbers, and reads that follow the routes."""

from __future__ import annotations

import pytest
import torch
from hf_models import DECODING, WINDOW, make_aha, make_family, random_tokens, set_routes
from torch import Tensor

from megatron_aha.hf.exported.kernels_aha import KERNELS, span_of
from megatron_aha.hf.exported.modeling_aha import CACHE_FIELD

TOLERANCE = 1e-5


def both(**options: object) -> tuple:
    """Returns one model with the kernels and with eager attention."""
    return make_aha(KERNELS, **options), make_aha("eager", **options)


def assert_equal(ours: Tensor, expected: Tensor) -> None:
    assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("routes", ["here", "all", "mixed"])
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("granularity", ["head", "kv_group"])
def test_one_pass_chunks_and_single_steps_equal_eager(routes: str, sinks: int, granularity: str) -> None:
    ours, eager = both(aha_num_sink_tokens=sinks, aha_granularity=granularity)
    for model in (ours, eager):
        set_routes(model, routes)
    tokens = random_tokens(2, 40)
    with torch.no_grad():
        expected = eager(tokens).logits
        assert_equal(ours(tokens).logits, expected)
        for pieces in ([25, 15], [1] * 40):
            cache, parts = None, []
            for part in tokens.split(pieces, dim=1):
                output = ours(part, use_cache=True, **({CACHE_FIELD: cache} if cache is not None else {}))
                cache = getattr(output, CACHE_FIELD)
                parts.append(output.logits)
            assert_equal(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_at_either_end_equals_eager(side: str) -> None:
    ours, eager = both(aha_num_sink_tokens=2)
    tokens = random_tokens(2, 32)
    mask = torch.ones_like(tokens)
    padding = slice(0, 7) if side == "left" else slice(25, None)
    mask[1, padding] = 0
    real = mask.bool()
    with torch.no_grad():
        found, expected = (
            model(tokens, attention_mask=mask, output_router_stats=True) for model in (ours, eager)
        )
    assert_equal(found.logits[real], expected.logits[real])
    assert torch.equal(found.router_usage, expected.router_usage)


@pytest.mark.parametrize("cache", [{"use_cache": True}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("way", DECODING)
def test_generating_equals_eager_without_a_cache(cache: dict, way: str) -> None:
    ours, eager = both()
    tokens = random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    tokens[0, :6], mask[0, :6] = 0, 0
    options = {"attention_mask": mask, "min_new_tokens": 12, **DECODING[way]}
    torch.manual_seed(5)
    expected = eager.generate(tokens, max_new_tokens=12, use_cache=False, **options)
    torch.manual_seed(5)
    assert torch.equal(ours.generate(tokens, max_new_tokens=12, **cache, **options), expected)


@pytest.mark.parametrize("family", ["qwen3", "olmo3", "gemma3_text"])
def test_other_families_and_their_windowed_layers_equal_eager(family: str) -> None:
    tokens = random_tokens(2, 40)
    with torch.no_grad():
        ours, expected = (make_family(family, True, name)(tokens).logits for name in (KERNELS, "eager"))
    assert_equal(ours, expected)


def test_gradients_of_weights_and_routers_equal_eager() -> None:
    tokens = random_tokens(2, 32)
    gradients = []
    for model in both(aha_loss_coefficient=0.5):
        model.train()(tokens, labels=tokens).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[1].items():
        assert (gradients[0][name] - expected).norm() <= 1e-4 * expected.norm(), name


def test_a_mask_that_is_more_than_padding_is_left_to_torch() -> None:
    ours, eager = both()
    tokens = random_tokens(1, 40)
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    holes = torch.ones_like(tokens)
    holes[0, 10] = 0
    with torch.no_grad():
        for given in ({"position_ids": positions, "use_cache": False}, {"attention_mask": holes}):
            assert_equal(ours(tokens, **given).logits, eager(tokens, **given).logits)
    mask = (torch.arange(5) <= torch.arange(5)[:, None]) & (torch.arange(5) != 2)
    assert span_of(mask[None, None], torch.arange(5)) is None


def test_decoding_does_not_read_what_no_route_opens() -> None:
    """Keys and values beyond the window may be anything when all routes are *here*."""
    model = make_aha(KERNELS)
    set_routes(model, "here")
    tokens = random_tokens(1, 32)
    with torch.no_grad():
        cache = getattr(model(tokens[:, :31], use_cache=True), CACHE_FIELD)
        for layer in cache.layers:
            layer.keys[:, :, : 31 - WINDOW + 1] = float("nan")
            layer.values[:, :, : 31 - WINDOW + 1] = float("nan")
        assert model(tokens[:, 31:], **{CACHE_FIELD: cache}).logits.isfinite().all()


def test_the_kernels_are_chosen_by_name() -> None:
    model = make_aha("sdpa")
    model.set_attn_implementation(KERNELS)
    assert model.config._attn_implementation == KERNELS
