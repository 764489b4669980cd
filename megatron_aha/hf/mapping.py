"""How a weight of ours is made of weights of theirs, and back: one dictionary per family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.errors import UserError


@dataclass(frozen=True)
class Rule(ABC):
    """What one of our weights is made of.

    Args:
        theirs: their names, a star for the layer's number.
    """

    theirs: tuple[str, ...]

    @abstractmethod
    def merge(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """Returns our weight from theirs."""

    @abstractmethod
    def split(self, whole: Tensor, model: ModelConfig) -> list[Tensor]:
        """Returns their weights from ours; the exact inverse of ``merge``."""


@dataclass(frozen=True)
class Same(Rule):
    """The same weight under another name."""

    def merge(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return parts[0]

    def split(self, whole: Tensor, model: ModelConfig) -> list[Tensor]:
        return [whole]


@dataclass(frozen=True)
class Rows(Rule):
    """Weights of equal shape one above the other, such as SwiGLU's gate and up."""

    def merge(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return torch.cat(tuple(parts))

    def split(self, whole: Tensor, model: ModelConfig) -> list[Tensor]:
        return list(whole.chunk(len(self.theirs)))


@dataclass(frozen=True)
class QKV(Rule):
    """Query, key and value projections, interleaved per key/value group as Megatron-core stores them.

    A group's rows are those of its query heads, then of its key head, then of its value head, so that any
    tensor-parallel cut between groups gives each rank whole groups.
    """

    def merge(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        grouped = [part.unflatten(0, (model.num_query_groups, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)  # [(heads + 2 groups) * head_dim, hidden]

    def split(self, whole: Tensor, model: ModelConfig) -> list[Tensor]:
        heads_per_group = model.num_attention_heads // model.num_query_groups
        rows = [heads_per_group * model.head_dim, model.head_dim, model.head_dim]
        grouped = whole.unflatten(0, (model.num_query_groups, -1))
        return [part.flatten(0, 1) for part in grouped.split(rows, dim=1)]


_LAYER, _THEIR_LAYER = "decoder.layers.*.", "model.layers.*."

OUTPUT = "output_layer.weight"

LLAMA: dict[str, Rule] = {
    "embedding.word_embeddings.weight": Same(("model.embed_tokens.weight",)),
    _LAYER + "input_layernorm.weight": Same((_THEIR_LAYER + "input_layernorm.weight",)),
    _LAYER + "self_attention.linear_qkv.weight": QKV(
        tuple(_THEIR_LAYER + f"self_attn.{part}_proj.weight" for part in "qkv")
    ),
    _LAYER + "self_attention.linear_proj.weight": Same((_THEIR_LAYER + "self_attn.o_proj.weight",)),
    _LAYER + "self_attention.router.weight": Same((_THEIR_LAYER + "self_attn.router.weight",)),
    _LAYER + "self_attention.router.bias": Same((_THEIR_LAYER + "self_attn.router.bias",)),
    _LAYER + "pre_mlp_layernorm.weight": Same((_THEIR_LAYER + "post_attention_layernorm.weight",)),
    _LAYER + "mlp.linear_fc1.weight": Rows(
        (_THEIR_LAYER + "mlp.gate_proj.weight", _THEIR_LAYER + "mlp.up_proj.weight")
    ),
    _LAYER + "mlp.linear_fc2.weight": Same((_THEIR_LAYER + "mlp.down_proj.weight",)),
    "decoder.final_layernorm.weight": Same(("model.norm.weight",)),
    OUTPUT: Same(("lm_head.weight",)),
}

FAMILIES: dict[str, dict[str, Rule]] = {"llama": LLAMA}


@dataclass(frozen=True)
class Weight:
    """One weight of a model: its name here, its names there, and the rule between them."""

    ours: str
    theirs: tuple[str, ...]
    rule: Rule


def weights(model: ModelConfig, aha: AHAConfig | None) -> Iterator[Weight]:
    """Yields every weight that the model has, layer by layer.

    Args:
        model: sizes of the decoder.
        aha: the attention variant, or None for a dense model, which has no routers.

    Raises:
        UserError: the family is unknown.
    """
    if model.family not in FAMILIES:
        raise UserError(
            f"models of the family '{model.family}' cannot be converted: {', '.join(FAMILIES)} can"
        )
    routed = aha is not None and aha.enabled
    per_layer: list[tuple[str, Rule]] = []
    others: list[tuple[str, Rule]] = []
    for ours, rule in FAMILIES[model.family].items():
        if (
            (".router." in ours and not routed)
            or (ours.endswith("router.bias") and aha is not None and not aha.bias)
            or (ours == OUTPUT and model.tied_embeddings)
        ):
            continue
        (per_layer if "*" in ours else others).append((ours, rule))
    yield from (Weight(ours, rule.theirs, rule) for ours, rule in others)
    for layer in range(model.num_layers):
        for ours, rule in per_layer:
            theirs = tuple(name.replace("*", str(layer)) for name in rule.theirs)
            yield Weight(ours.replace("*", str(layer)), theirs, rule)


def shape_of(weight: Weight, model: ModelConfig, aha: AHAConfig | None) -> list[tuple[int, ...]]:
    """Returns the shapes that their weights must have, in the order of their names."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    queries, keys = model.num_attention_heads * model.head_dim, model.num_query_groups * model.head_dim
    per_head = aha is not None and aha.granularity == "head"
    routers = model.num_attention_heads if per_head else model.num_query_groups
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (model.vocab_size, hidden),
        "lm_head.weight": (model.vocab_size, hidden),
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
        "router.weight": (routers, hidden),
        "router.bias": (routers,),
        "gate_proj.weight": (ffn, hidden),
        "up_proj.weight": (ffn, hidden),
        "down_proj.weight": (hidden, ffn),
    }
    # what is not listed is a norm
    return [shapes.get(".".join(name.split(".")[-2:]), (hidden,)) for name in weight.theirs]
