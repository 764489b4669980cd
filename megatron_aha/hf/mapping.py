"""Which weights a model has, under our names and under theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.errors import UserError
from megatron_aha.hf.families import FAMILIES, OUTPUT
from megatron_aha.hf.rules import Rule


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
    windowed = set(model.windowed_layers)
    per_layer: list[tuple[str, Rule]] = []
    others: list[tuple[str, Rule]] = []
    for ours, rule in FAMILIES[model.family].mapping.items():
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
            if ".router." in ours and layer in windowed:
                continue
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
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
        "o_proj.weight": (hidden, queries),
        "router.weight": (routers, hidden),
        "router.bias": (routers,),
        "gate_proj.weight": (ffn, hidden),
        "up_proj.weight": (ffn, hidden),
        "down_proj.weight": (hidden, ffn),
    }
    if model.traits.qk_norm != "none":
        whole = model.traits.qk_norm == "projection"
        shapes["q_norm.weight"] = (queries,) if whole else (model.head_dim,)
        shapes["k_norm.weight"] = (keys,) if whole else (model.head_dim,)
    # what is not listed is a norm of the residual stream
    return [shapes.get(".".join(name.split(".")[-2:]), (hidden,)) for name in weight.theirs]
