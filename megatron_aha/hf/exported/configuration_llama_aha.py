"""Configuration of a Llama model with All-or-Here Attention (arXiv 2512.22562)."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig
from transformers import __version__ as transformers_version


class LlamaAHAConfig(LlamaConfig):
    """Llama's configuration and the router's.

    Args:
        aha_window: keys that a token sees when its route is *here*, in tokens, including the token itself.
        aha_num_sink_tokens: first tokens of each document that *here* sees as well.
        aha_granularity: ``head`` (a route per query head) or ``kv_group`` (a route per key/value head).
        aha_bias: whether the router has a bias.
        aha_loss_coefficient: weight of the router loss, mean sigmoid(logit), in the loss that ``labels``
            gives.
        kwargs: everything that ``LlamaConfig`` takes.
    """

    model_type = "llama_aha"
    # Sharding q_proj by heads would need the router sharded alike.
    base_model_tp_plan = None

    def __init__(
        self,
        aha_window: int = 256,
        aha_num_sink_tokens: int = 0,
        aha_granularity: str = "head",
        aha_bias: bool = False,
        aha_loss_coefficient: float = 3e-4,
        **kwargs: Any,
    ) -> None:
        if not isinstance(aha_window, int) or aha_window < 1:
            raise ValueError(f"aha_window must be a whole number from 1 (the token itself), not {aha_window}")
        if aha_granularity not in ("head", "kv_group"):
            raise ValueError(f"aha_granularity must be 'head' or 'kv_group', not '{aha_granularity}'")
        self.aha_window = aha_window
        self.aha_num_sink_tokens = aha_num_sink_tokens
        self.aha_granularity = aha_granularity
        self.aha_bias = aha_bias
        self.aha_loss_coefficient = aha_loss_coefficient
        if int(transformers_version.split(".")[0]) < 5 and kwargs.get("rope_parameters"):
            # transformers 5 saves one dictionary, which 4 would ignore without a word
            rope = dict(kwargs.pop("rope_parameters"))
            kwargs["rope_theta"] = rope.pop("rope_theta", 10000.0)
            kwargs["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
        super().__init__(**kwargs)

    @property
    def num_routers(self) -> int:
        """Routers per layer."""
        return self.num_attention_heads if self.aha_granularity == "head" else self.num_key_value_heads


LlamaAHAConfig.register_for_auto_class()
