"""Configuration of a Olmo2 model with All-or-Here Attention (arXiv 2512.22562)."""

from __future__ import annotations

from typing import Any

from transformers import Olmo2Config

from .configuration_aha import RouterConfig


class Olmo2AHAConfig(RouterConfig, Olmo2Config):
    """Olmo2's configuration and the router's, see `RouterConfig`."""

    model_type = "olmo2_aha"

    def __init__(self, **options: Any) -> None:
        super().__init__(**self.take_router_settings(options))


Olmo2AHAConfig.register_for_auto_class()
