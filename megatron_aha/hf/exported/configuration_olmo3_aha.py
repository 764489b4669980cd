"""Configuration of a Olmo3 model with All-or-Here Attention (arXiv 2512.22562)."""

from __future__ import annotations

from typing import Any

from transformers import Olmo3Config

from .configuration_aha import RouterConfig


class Olmo3AHAConfig(RouterConfig, Olmo3Config):
    """Olmo3's configuration and the router's, see `RouterConfig`."""

    model_type = "olmo3_aha"

    def __init__(self, **options: Any) -> None:
        super().__init__(**self.take_router_settings(options))


Olmo3AHAConfig.register_for_auto_class()
