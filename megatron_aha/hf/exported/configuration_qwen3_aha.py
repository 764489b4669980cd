"""Configuration of a Qwen3 model with All-or-Here Attention (arXiv 2512.22562)."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config

from .configuration_aha import RouterConfig


class Qwen3AHAConfig(RouterConfig, Qwen3Config):
    """Qwen3's configuration and the router's, see `RouterConfig`."""

    model_type = "qwen3_aha"

    def __init__(self, **options: Any) -> None:
        super().__init__(**self.take_router_settings(options))


Qwen3AHAConfig.register_for_auto_class()
