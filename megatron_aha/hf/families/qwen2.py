"""Qwen2 and Qwen2.5: biases on query, key and value; optionally static windows from some layer on."""

from __future__ import annotations

from typing import Any

from megatron_aha.config.model import ModelConfig
from megatron_aha.hf.families.base import (
    COMMON,
    LAYER,
    PRE_NORMS,
    THEIR_LAYER,
    HFFamily,
    by_layer_types,
    layer_types,
)
from megatron_aha.hf.rules import QKV


def windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, list[int]]:
    """Returns the window of the layers from ``max_window_layers`` on, if windows are in use."""
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return None, []
    if config.get("layer_types"):
        return by_layer_types(config, num_layers)
    layers = list(range(int(config.get("max_window_layers", 28)), num_layers))
    return (int(config["sliding_window"]), layers) if layers else (None, [])


def entries(model: ModelConfig) -> dict[str, Any]:
    """Returns the windows in both spellings."""
    return {
        "use_sliding_window": bool(model.windowed_layers),
        "sliding_window": model.static_window,
        "max_window_layers": min(model.windowed_layers, default=model.num_layers),
        "layer_types": layer_types(model),
    }


BIASES = {
    LAYER + "self_attention.linear_qkv.bias": QKV(
        tuple(THEIR_LAYER + f"self_attn.{part}_proj.bias" for part in "qkv")
    )
}

FAMILY = HFFamily("qwen2", "Qwen2", {**COMMON, **PRE_NORMS, **BIASES}, windows, entries)
