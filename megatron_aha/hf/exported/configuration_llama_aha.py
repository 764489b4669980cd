"""Configuration of a Llama model with All-or-Here Attention (arXiv 2512.22562)."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from .configuration_aha import RouterConfig


class LlamaAHAConfig(RouterConfig, LlamaConfig):
    """Llama's configuration and the router's, see `RouterConfig`."""

    model_type = "llama_aha"

    def __init__(self, **options: Any) -> None:
        super().__init__(**self.take_router_settings(options))


LlamaAHAConfig.register_for_auto_class()
