"""The attention of exported models, in transformers alone."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_models import DECODING, WINDOW, make_aha, make_llama, random_tokens, set_routes
from torch import Tensor

from megatron_aha.hf.exported.configuration_llama_aha import LlamaAHAConfig
from megatron_aha.hf.exported.kernels_aha import KERNELS
from megatron_aha.hf.exported.modeling_aha import CACHE_FIELD
from megatron_aha.hf.exported.modeling_llama_aha import LlamaAHAForCausalLM

ATTENTIONS = ("eager", "sdpa")
TOLERANCE = 1e-5


def visible_keys(model: LlamaAHAForCausalLM, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns which input token each output depends on in the first layer, bool ``[tokens, tokens]``."""
    one_layer = copy.deepcopy(model)
    one_layer.model.layers = one_layer.model.layers[:1]
    one_layer.config.num_hidden_layers = 1
    embedded = one_layer.model.embed_tokens(tokens).detach()

    def run(states: Tensor) -> Tensor:
        return one_layer.model(
            inputs_embeds=states, attention_mask=mask, use_cache=False
        ).last_hidden_state.sum(-1)

    gradient = torch.autograd.functional.jacobian(run, embedded)  # [1, out, 1, in, hidden]
    return gradient.abs().sum(-1)[0, :, 0] > 0


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("window", [1, 2, 8, 31, 32, 33])
def test_a_window_of_w_is_the_token_itself_and_w_minus_1_before_it(attention: str, window: int) -> None:
    model = make_aha(attention, aha_window=window)
    row, column = torch.arange(32)[:, None], torch.arange(32)
    for routes, expected in (
        ("here", (column <= row) & (column > row - window)),
        ("all", column <= row),
    ):
        set_routes(model, routes)
        assert torch.equal(visible_keys(model, random_tokens(1, 32)), expected), routes


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("padding", [0, 5])
def test_sinks_are_the_first_tokens_after_the_padding(attention: str, padding: int) -> None:
    model = make_aha(attention, aha_num_sink_tokens=2)
    set_routes(model, "here")
    tokens = random_tokens(1, 32)
    mask = (torch.arange(32) >= padding).long()[None]
    row, column = torch.arange(32)[:, None], torch.arange(32)
    sink = (column >= padding) & (column < padding + 2)
    expected = (column <= row) & ((column > row - WINDOW) | sink) & (column >= padding)
    seen = visible_keys(model, tokens, mask)
    assert torch.equal(seen[padding:], expected[padding:])


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_outside_the_window_matters_when_all_routes_are_here(
    attention: str, with_mask: bool, training: bool
) -> None:
    model = make_aha(attention, num_hidden_layers=1).train(training)
    set_routes(model, "here")
    tokens = random_tokens(2, 32)
    other = tokens.clone()
    other[:, 10] = (other[:, 10] + 1) % 301
    mask = torch.ones_like(tokens) if with_mask else None
    first, second = (model(ids, attention_mask=mask, use_cache=False).logits for ids in (tokens, other))
    changed = (first != second).any(-1).any(0)
    assert changed[10 : 10 + WINDOW].all()
    assert not changed[:10].any() and not changed[10 + WINDOW :].any()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_decoding_sees_the_window_only(attention: str) -> None:
    model = make_aha(attention, num_hidden_layers=1)
    set_routes(model, "here")
    tokens = random_tokens(1, 32)
    other = tokens.clone()
    other[:, : 31 - WINDOW + 1] = 5
    last = []
    for ids in (tokens, other):
        cache = getattr(model(ids[:, :31], use_cache=True), CACHE_FIELD)
        last.append(model(ids[:, 31:], **{CACHE_FIELD: cache}).logits)
    assert torch.equal(last[0], last[1])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_all_routes_open_is_the_dense_model(attention: str) -> None:
    model = make_aha(attention)
    set_routes(model, "all")
    dense = make_llama(attn_implementation=attention)
    dense.load_state_dict({k: v for k, v in model.state_dict().items() if ".router." not in k})
    tokens = random_tokens(2, 40)
    assert torch.equal(model(tokens).logits, dense(tokens).logits)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("routes", ["here", "all", "mixed"])
@pytest.mark.parametrize("granularity", ["head", "kv_group"])
def test_chunked_prefill_and_single_steps_equal_one_pass(
    attention: str, routes: str, granularity: str
) -> None:
    model = make_aha(attention, aha_granularity=granularity)
    set_routes(model, routes)
    tokens = random_tokens(2, 32)
    whole = model(tokens).logits
    for pieces in ([20, 12], [1] * 32):
        cache, parts = None, []
        for part in tokens.split(pieces, dim=1):
            output = model(part, use_cache=True, **({CACHE_FIELD: cache} if cache is not None else {}))
            cache = getattr(output, CACHE_FIELD)
            parts.append(output.logits)
        assert (torch.cat(parts, dim=1) - whole).abs().max() <= TOLERANCE * whole.abs().max()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("routes", ["here", "mixed"])
def test_left_and_right_padding_change_neither_logits_nor_usage(
    attention: str, sinks: int, routes: str
) -> None:
    model = make_aha(attention, aha_num_sink_tokens=sinks)
    set_routes(model, routes)
    tokens = random_tokens(1, 20)
    alone = model(tokens, output_router_stats=True)
    pad = torch.zeros(1, 5, dtype=torch.long)
    for parts, kept in (([pad, tokens], slice(5, None)), ([tokens, pad], slice(0, 20))):
        padded = torch.cat(parts, dim=1)
        mask = torch.cat([torch.zeros_like(p) if p is pad else torch.ones_like(p) for p in parts], dim=1)
        output = model(padded, attention_mask=mask, output_router_stats=True)
        difference = (output.logits[:, kept] - alone.logits).abs().max()
        assert difference <= TOLERANCE * alone.logits.abs().max()
        assert torch.equal(output.router_usage, alone.router_usage)
        assert torch.equal(output.router_usage_beyond_window, alone.router_usage_beyond_window)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("way", DECODING)
def test_generating_with_a_cache_equals_generating_without(attention: str, cache: str, way: str) -> None:
    model = make_aha(attention)
    tokens = random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    tokens[0, :6], mask[0, :6] = 0, 0
    options = {"attention_mask": mask, "min_new_tokens": 20, **DECODING[way]}
    cached = {"use_cache": True} | ({"cache_implementation": "static"} if cache == "static" else {})
    torch.manual_seed(5)
    with_cache = model.generate(tokens, max_new_tokens=20, **cached, **options)
    torch.manual_seed(5)
    without = model.generate(tokens, max_new_tokens=20, use_cache=False, **options)
    assert torch.equal(with_cache, without)
    assert len(without[0, 20:].unique()) > 5


@pytest.mark.parametrize("attention", [*ATTENTIONS, KERNELS])
def test_rows_that_see_nothing_are_finite_forward_and_backward(attention: str) -> None:
    model = make_aha(attention, aha_window=1).train()
    tokens = random_tokens(2, 24)
    mask = torch.ones_like(tokens)
    mask[0, :9], mask[1, 15:] = 0, 0
    output = model(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_router_gets_the_straight_through_gradient() -> None:
    """dL/dp = <dL/dO, O_all - O_here>, whatever the route and also where sigmoid is flat."""
    model = make_aha(num_hidden_layers=1)
    layer = model.model.layers[0].self_attn
    torch.nn.init.zeros_(layer.router.weight)
    layer.router.bias.data = torch.tensor([20.0, -20.0, 0.1, -0.1])
    tokens = random_tokens(1, 20)
    probe = torch.randn(1, 20, 301)
    (model(tokens).logits * probe).sum().backward()
    given = layer.router.bias.grad.clone()

    def mixed(share: Tensor) -> Tensor:
        """The loss with routes 0 to 1 in between, where the gradient is the ordinary one."""
        mixing = copy.deepcopy(model)
        mixing.model.layers[0].self_attn.straight_through = lambda logits: share.expand(1, 20, 4)
        return (mixing(tokens).logits * probe).sum()

    hard = torch.tensor([1.0, 0.0, 1.0, 0.0], requires_grad=True)
    (slope,) = torch.autograd.grad(mixed(hard), hard)
    bias = layer.router.bias.detach()
    expected = slope * bias.sigmoid() * (1 - bias.sigmoid())
    assert (given - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert given[:2].abs().max() < 1e-6 < given[2:].abs().min()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant: bool) -> None:
    tokens = random_tokens(2, 24)
    gradients = []
    for checkpointing in (False, True):
        model = make_aha(aha_loss_coefficient=0.5).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        gradients.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def test_the_loss_is_the_language_loss_and_the_router_loss_over_the_tokens_that_carry_loss() -> None:
    model = make_aha(aha_loss_coefficient=0.5)
    tokens = random_tokens(2, 20)
    labels = tokens.clone()
    labels[0, :7] = -100
    mask = torch.ones_like(tokens)
    mask[1, 15:] = 0
    labels[1, 15:] = -100
    output = model(tokens, attention_mask=mask, labels=labels)
    logits = torch.stack(model.model(tokens, attention_mask=mask).router_logits)
    carries = torch.zeros(2, 20, dtype=torch.bool)
    carries[:, :-1] = labels[:, 1:] != -100
    router_loss = logits.sigmoid().mean((0, -1))[carries].mean()
    language_loss = torch.nn.functional.cross_entropy(output.logits[carries], labels[:, 1:][carries[:, :-1]])
    assert torch.allclose(output.router_loss, router_loss)
    assert torch.allclose(output.loss, language_loss + 0.5 * router_loss)
    # As the Trainer does when it accumulates: every micro-batch is divided by the tokens of all.
    half = model(tokens, attention_mask=mask, labels=labels, num_items_in_batch=2 * carries.sum())
    assert torch.allclose(2 * half.loss, output.loss)


def test_statistics_count_what_the_routers_decided() -> None:
    model = make_aha()
    tokens = random_tokens(2, 30)
    output = model(tokens, output_router_stats=True)
    logits = torch.stack(model.model(tokens).router_logits)
    assert torch.equal(torch.stack(output.routes), logits > 0)
    assert torch.allclose(output.router_usage, (logits > 0).float().mean((1, 2)))
    assert torch.allclose(output.router_usage_beyond_window, (logits > 0)[:, :, WINDOW:].float().mean((1, 2)))
    assert 0.1 < output.router_usage.mean() < 0.9
    plain = model(tokens)
    assert plain.routes is None and plain.router_usage is None


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_packed_documents_do_not_see_each_other(attention: str) -> None:
    model = make_aha(attention, aha_num_sink_tokens=1)
    tokens = random_tokens(1, 40)
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    packed = model(tokens, position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(part).logits for part in tokens.split([15, 25], dim=1)], dim=1)
    assert (packed - apart).abs().max() <= TOLERANCE * apart.abs().max()


def test_routes_are_decided_in_fp32_under_bf16_and_autocast() -> None:
    model = make_aha().to(torch.bfloat16)
    layer = model.model.layers[0].self_attn
    states = torch.randn(1, 64, 64, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(
        states.float(), layer.router.weight.float(), layer.router.bias.float()
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.route_logits(states), expected)
    assert torch.equal(layer.route_logits(states), expected)


def test_all_hidden_states_and_effective_attentions_are_returned_on_request() -> None:
    model = make_aha("eager")
    set_routes(model, "here")
    output = model(random_tokens(1, 20), output_attentions=True, output_hidden_states=True)
    assert [state.shape for state in output.hidden_states] == [(1, 20, 64)] * 3
    assert len(output.attentions) == 2
    assert torch.allclose(output.attentions[0].sum(-1), torch.ones(1, 4, 20))
    assert (output.attentions[0][:, :, 19, : 20 - WINDOW] == 0).all()
    assert model(random_tokens(1, 20)).attentions is None


@pytest.mark.parametrize(
    "options", [{"aha_window": 0}, {"aha_window": -1}, {"aha_window": None}, {"aha_granularity": "token"}]
)
def test_settings_without_a_meaning_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LlamaAHAConfig(**options)


def test_attention_implementations_that_would_ignore_the_routes_are_refused() -> None:
    for attention in ("flash_attention_2", "flex_attention"):
        with pytest.raises((ValueError, ImportError)):
            make_aha(attention)
        model = make_aha("sdpa")
        with pytest.raises((ValueError, ImportError)):
            model.set_attn_implementation(attention)


def test_the_attention_implementation_of_a_loaded_model_can_be_changed() -> None:
    model, tokens = make_aha("sdpa"), random_tokens(2, 20)
    expected = model(tokens).logits
    for attention in ("eager", "aha_kernels", "sdpa"):
        model.set_attn_implementation(attention)
        assert {model.config._attn_implementation, model.model.config._attn_implementation} == {attention}
        output = model(tokens, output_attentions=attention == "eager")
        assert (output.logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
        assert (output.attentions is not None) == (attention == "eager")
