"""Mistral; in version 0.1 every layer has a static window."""

from __future__ import annotations

from typing import Any

from megatron_aha.config.model import ModelConfig
from megatron_aha.hf.families.base import COMMON, PRE_NORMS, HFFamily


def windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, list[int]]:
    """Returns the window of all layers, if there is one."""
    window = config.get("sliding_window")
    return (None, []) if window is None else (int(window), list(range(num_layers)))


def entries(model: ModelConfig) -> dict[str, Any]:
    """Returns the window, which transformers would set to 4096 where it is not stated."""
    return {"sliding_window": model.static_window}


FAMILY = HFFamily("mistral", "Mistral", {**COMMON, **PRE_NORMS}, windows, entries)
