"""Rules of the model's sizes, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_aha.config.families import FAMILIES
from megatron_aha.config.names import ROPE_SCALINGS
from megatron_aha.config.rules.common import above_zero, alternatives, at_least, one_of
from megatron_aha.config.run import RunConfig


def model_problems(config: RunConfig) -> Iterator[str]:
    """Yields a sentence for every size that no model can have."""
    model = config.model
    yield from one_of(config, "model.family", list(FAMILIES))
    sizes = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups head_dim vocab_size "
        "max_position_embeddings"
    )
    yield from at_least(config, 1, [f"model.{name}" for name in sizes.split()])
    yield from above_zero(config, ["model.rms_norm_eps", "model.rope_theta"])
    yield from at_least(config, 0, ["model.init_std"])
    heads, groups = model.num_attention_heads, model.num_query_groups
    if groups >= 1 and heads >= 1 and heads % groups:
        choices = [g for g in range(1, heads + 1) if heads % g == 0]
        yield (
            f"--model.num_query_groups {groups} does not divide --model.num_attention_heads {heads}; "
            f"use {alternatives(choices, groups)}"
        )
    if model.head_dim % 2:
        yield f"--model.head_dim {model.head_dim} is odd, but rotary embeddings turn pairs of channels"
    if model.attention_dropout:
        yield (
            f"--model.attention_dropout is {model.attention_dropout}, but dropout on attention "
            "probabilities is not supported; set it to 0"
        )
    if not 0 <= model.hidden_dropout < 1:
        yield f"--model.hidden_dropout is {model.hidden_dropout}, and must be at least 0 and below 1"
    yield from _family_problems(config)
    if model.rope_scaling is not None:
        yield from _rope_problems(config)
    yield from _window_problems(config)


def _family_problems(config: RunConfig) -> Iterator[str]:
    model = config.model
    stated = [
        name for name in ("windowed_rope_theta", "query_pre_attn_scalar") if getattr(model, name) is not None
    ]
    yield from above_zero(config, [f"model.{name}" for name in stated])
    for name in stated:
        having = [family for family, traits in FAMILIES.items() if name in traits.settings]
        if model.family in FAMILIES and model.family not in having:
            yield (
                f"--model.{name} {getattr(model, name)} has no place in --model.family {model.family}; "
                f"leave it null, or use {' or '.join(having)}"
            )


def _window_problems(config: RunConfig) -> Iterator[str]:
    model = config.model
    strangers = [layer for layer in model.windowed_layers if not 0 <= layer < model.num_layers]
    if strangers:
        yield (
            f"--model.windowed_layers names layer {strangers[0]}, but --model.num_layers {model.num_layers} "
            f"means layers 0 to {model.num_layers - 1}"
        )
    if model.windowed_layers and (model.static_window is None or model.static_window < 1):
        yield (
            f"--model.static_window is {model.static_window}, but --model.windowed_layers names "
            f"{len(model.windowed_layers)} layers that see no more; use 1 or more, the token itself included"
        )
    if model.static_window is not None and not model.windowed_layers:
        yield (
            f"--model.static_window {model.static_window} holds for no layer; name them in "
            "--model.windowed_layers, or leave it null (the router's window is --aha.window)"
        )
    if config.aha.enabled and model.windowed_layers and not model.routed_layers:
        yield (
            f"--aha.enabled true has nothing to route: all {model.num_layers} layers of --model.family "
            f"{model.family} see a static window of {model.static_window}; set --aha.enabled false"
        )


def _rope_problems(config: RunConfig) -> Iterator[str]:
    scaling = config.model.rope_scaling
    assert scaling is not None
    yield from one_of(config, "model.rope_scaling.kind", ROPE_SCALINGS)
    yield from above_zero(config, ["model.rope_scaling.factor"])
    if scaling.kind == "yarn" and not 0 < scaling.beta_slow < scaling.beta_fast:
        yield (
            f"--model.rope_scaling.beta_slow {scaling.beta_slow} must be above 0 and below "
            f"--model.rope_scaling.beta_fast {scaling.beta_fast}"
        )
    if scaling.kind == "llama3" and not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        yield (
            f"--model.rope_scaling.low_freq_factor {scaling.low_freq_factor} must be above 0 and below "
            f"--model.rope_scaling.high_freq_factor {scaling.high_freq_factor}"
        )
