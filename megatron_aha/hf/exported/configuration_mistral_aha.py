"""Configuration of a Mistral model with All-or-Here Attention (arXiv 2512.22562)."""

from __future__ import annotations

from typing import Any

from transformers import MistralConfig

from .configuration_aha import RouterConfig


class MistralAHAConfig(RouterConfig, MistralConfig):
    """Mistral's configuration and the router's, see `RouterConfig`."""

    model_type = "mistral_aha"

    def __init__(self, **options: Any) -> None:
        super().__init__(**self.take_router_settings(options))


MistralAHAConfig.register_for_auto_class()
