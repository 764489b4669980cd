"""Configuration of a Qwen2 model with All-or-Here Attention (arXiv 2512.22562)."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Config

from .configuration_aha import RouterConfig


class Qwen2AHAConfig(RouterConfig, Qwen2Config):
    """Qwen2's configuration and the router's, see `RouterConfig`."""

    model_type = "qwen2_aha"

    def __init__(self, **options: Any) -> None:
        super().__init__(**self.take_router_settings(options))


Qwen2AHAConfig.register_for_auto_class()
