"""What the converters know of a family, and the weights that most families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_aha.config.model import ModelConfig
from megatron_aha.hf.rules import QKV, Rows, Rule, Same

LAYER, THEIR_LAYER = "decoder.layers.*.", "model.layers.*."

OUTPUT = "output_layer.weight"

WINDOWED = "sliding_attention"


def same(ours: str, theirs: str) -> dict[str, Rule]:
    """Returns the entry of a layer's weight that only changes its name."""
    return {LAYER + ours: Same((THEIR_LAYER + theirs,))}


# Every family's, without the norms inside the layers.
COMMON: dict[str, Rule] = {
    "embedding.word_embeddings.weight": Same(("model.embed_tokens.weight",)),
    LAYER + "self_attention.linear_qkv.weight": QKV(
        tuple(THEIR_LAYER + f"self_attn.{part}_proj.weight" for part in "qkv")
    ),
    **same("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    **same("self_attention.router.weight", "self_attn.router.weight"),
    **same("self_attention.router.bias", "self_attn.router.bias"),
    LAYER + "mlp.linear_fc1.weight": Rows(
        (THEIR_LAYER + "mlp.gate_proj.weight", THEIR_LAYER + "mlp.up_proj.weight")
    ),
    **same("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    "decoder.final_layernorm.weight": Same(("model.norm.weight",)),
    OUTPUT: Same(("lm_head.weight",)),
}

PRE_NORMS: dict[str, Rule] = {
    **same("input_layernorm.weight", "input_layernorm.weight"),
    **same("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
}

POST_NORMS: dict[str, Rule] = {
    **same("self_attn_bda.norm.weight", "post_attention_layernorm.weight"),
    **same("mlp_bda.norm.weight", "post_feedforward_layernorm.weight"),
}

QK_NORMS: dict[str, Rule] = {
    **same("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    **same("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
}


def no_windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, list[int]]:
    """Returns that no layer has a static window."""
    return None, []


def by_layer_types(config: dict[str, Any], num_layers: int) -> tuple[int | None, list[int]]:
    """Returns the static window and its layers as ``layer_types`` and ``sliding_window`` say."""
    kinds = config.get("layer_types") or []
    layers = [layer for layer, kind in enumerate(kinds[:num_layers]) if kind == WINDOWED]
    return (int(config["sliding_window"]), layers) if layers else (None, [])


def layer_types(model: ModelConfig) -> list[str]:
    """Returns the kind of each layer under transformers' names."""
    return [
        "full_attention" if model.window_of(layer) is None else WINDOWED for layer in range(model.num_layers)
    ]


def nothing_more(model: ModelConfig) -> dict[str, Any]:
    """Returns that the family's configuration has no entries of its own."""
    return {}


def by_head_dim(config: dict[str, Any]) -> int | None:
    """Returns that attention scores are divided by the square root of the width of a head."""
    return None


@dataclass(frozen=True)
class HFFamily:
    """A family of transformers' decoders.

    Args:
        name: ours, the same as transformers' ``model_type``.
        prefix: of the names of transformers' classes.
        mapping: our weights by name, a star for the layer's number, and what they are made of.
        windows: reads the static window (keys, the token itself included) and its layers from a configuration and
            the number of layers.
        entries: what the family's configuration says beside the common entries.
        defaults: what transformers takes for entries that the configuration leaves out, where it differs from
            Llama's.
        allowed: values of options that it may have, where they differ from other families'.
        rope_by_layer_type: its newer configurations have a set of rotary settings for each kind of layer.
        windowed_base: layers with a window have a rotary base of their own.
        score_divisor: reads by whose square root attention scores are divided, None: by the width of a head.
    """

    name: str
    prefix: str
    mapping: dict[str, Rule]
    windows: Callable[[dict[str, Any], int], tuple[int | None, list[int]]] = no_windows
    entries: Callable[[ModelConfig], dict[str, Any]] = nothing_more
    defaults: dict[str, Any] = field(default_factory=dict)
    allowed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    rope_by_layer_type: bool = False
    windowed_base: bool = False
    score_divisor: Callable[[dict[str, Any]], int | None] = by_head_dim

    @property
    def dense(self) -> str:
        """The architecture without routers: transformers' own."""
        return f"{self.prefix}ForCausalLM"

    @property
    def aha(self) -> str:
        """The architecture with routers: ours."""
        return f"{self.prefix}AHAForCausalLM"
