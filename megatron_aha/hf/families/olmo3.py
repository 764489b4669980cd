"""OLMo-3: OLMo-2's layers, three of four with a static window; the RoPE scaling is for the others."""

from __future__ import annotations

from typing import Any

from megatron_aha.config.model import ModelConfig
from megatron_aha.hf.families.base import (
    COMMON,
    POST_NORMS,
    QK_NORMS,
    WINDOWED,
    HFFamily,
    by_layer_types,
    layer_types,
)


def windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, list[int]]:
    """Returns the window and its layers, by default all but every fourth."""
    kinds = config.get("layer_types") or [
        "full_attention" if (layer + 1) % 4 == 0 else WINDOWED for layer in range(num_layers)
    ]
    return by_layer_types({"sliding_window": 4096, **config, "layer_types": kinds}, num_layers)


def entries(model: ModelConfig) -> dict[str, Any]:
    """Returns the window and the kind of each layer."""
    return {"sliding_window": model.static_window, "layer_types": layer_types(model)}


FAMILY = HFFamily(
    "olmo3",
    "Olmo3",
    {**COMMON, **POST_NORMS, **QK_NORMS},
    windows,
    entries,
    defaults={"rms_norm_eps": 1e-5},
    rope_by_layer_type=True,
)
