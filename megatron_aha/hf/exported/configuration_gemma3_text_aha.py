"""Configuration of a Gemma3 text model with All-or-Here Attention (arXiv 2512.22562)."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3TextConfig

from .configuration_aha import RouterConfig


class Gemma3AHAConfig(RouterConfig, Gemma3TextConfig):
    """Gemma3's configuration and the router's, see `RouterConfig`."""

    model_type = "gemma3_text_aha"

    def __init__(self, **options: Any) -> None:
        settings = self.take_router_settings(options)
        windowed = (options.get("rope_parameters") or {}).get("sliding_attention")
        if windowed and "rope_parameters" not in settings:  # transformers 4
            settings["rope_local_base_freq"] = windowed["rope_theta"]
        super().__init__(**settings)


Gemma3AHAConfig.register_for_auto_class()
