"""Gemma 3 without images: five of six layers with a window and a rotary base of their own, norms on both sides."""

from __future__ import annotations

from typing import Any

from megatron_aha.config.model import ModelConfig
from megatron_aha.errors import UserError
from megatron_aha.hf.families.base import (
    COMMON,
    POST_NORMS,
    QK_NORMS,
    WINDOWED,
    HFFamily,
    by_layer_types,
    layer_types,
    same,
)

ACTIVATION = "gelu_pytorch_tanh"


def windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, list[int]]:
    """Returns the window and its layers, by default all but every sixth."""
    every = int(config.get("sliding_window_pattern", 6))
    kinds = config.get("layer_types") or [
        "full_attention" if (layer + 1) % every == 0 else WINDOWED for layer in range(num_layers)
    ]
    return by_layer_types({**config, "layer_types": kinds}, num_layers)


def score_divisor(config: dict[str, Any]) -> int | None:
    """Returns ``query_pre_attn_scalar``, None where it is the width of a head."""
    stated = config["query_pre_attn_scalar"]
    if stated != int(stated) or stated < 1:
        raise UserError(
            f"the source's query_pre_attn_scalar = {stated!r} is not supported: it must be a whole number from 1"
        )
    return None if stated == config["head_dim"] else int(stated)


def entries(model: ModelConfig) -> dict[str, Any]:
    """Returns the window, the kind of each layer, and what scores are divided by."""
    return {
        "sliding_window": model.static_window or DEFAULTS["sliding_window"],
        "layer_types": layer_types(model),
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_dim,
        "hidden_act": ACTIVATION,
        "hidden_activation": ACTIVATION,
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}

FAMILY = HFFamily(
    "gemma3_text",
    "Gemma3",
    {
        **COMMON,
        **same("input_layernorm.weight", "input_layernorm.weight"),
        **same("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"),
        **POST_NORMS,
        **QK_NORMS,
    },
    windows,
    entries,
    defaults=DEFAULTS,
    allowed={
        "hidden_act": (ACTIVATION, None),
        "hidden_activation": (ACTIVATION, None),
        "use_bidirectional_attention": (False, None),
    },
    rope_by_layer_type=True,
    windowed_base=True,
    score_divisor=score_divisor,
)
