"""Layer specs: Megatron-core's own layer with our norms and attention in their places."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_aha.attention.core import AHACoreAttention, DenseCoreAttention, WindowCoreAttention
from megatron_aha.attention.rope import inverse_frequencies, layer_scaling, layer_theta, rotation_scale
from megatron_aha.attention.self_attention import AHASelfAttention, PackedSelfAttention
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.parallel.norm import HeadNorm, KeyNorm, NormThenAdd, QueryNorm, RMSNorm

# By the family's qk_norm: the norms of queries and of keys.
_QK_NORMS: dict[str, tuple[type, type]] = {"head": (HeadNorm, HeadNorm), "projection": (QueryNorm, KeyNorm)}


def attention_spec(submodules: Any, model: ModelConfig, aha: AHAConfig, layer: int) -> ModuleSpec:
    """Returns the self-attention of a layer: a static window where the model has one, else AHA or dense.

    Args:
        submodules: Megatron-core's ``SelfAttentionSubmodules`` with the projections; its core attention and norms
            are replaced.
        model: windowed layers, rotary scaling and norms.
        aha: the attention variant. A further variant is one more branch here.
        layer: from 0, over the whole model.
    """
    scaling, theta = layer_scaling(model, layer), layer_theta(model, layer)
    as_the_model = (scaling, theta) == (model.rope_scaling, model.rope_theta)
    params: dict[str, Any] = {
        "attn_mask_type": AttnMaskType.causal,
        "rotation_scale": rotation_scale(scaling),
        "frequencies": None if as_the_model else inverse_frequencies(model, scaling, theta),
    }
    if model.traits.qk_norm != "none":
        submodules.q_layernorm, submodules.k_layernorm = _QK_NORMS[model.traits.qk_norm]
    window = model.window_of(layer)
    if window is not None:
        submodules.core_attention = _builder(WindowCoreAttention, window=window, backend=aha.backend)
        return ModuleSpec(module=PackedSelfAttention, params=params, submodules=submodules)
    if not aha.enabled:
        submodules.core_attention = DenseCoreAttention
        return ModuleSpec(module=PackedSelfAttention, params=params, submodules=submodules)
    submodules.core_attention = _builder(AHACoreAttention, aha=aha)
    return ModuleSpec(module=AHASelfAttention, params={**params, "aha": aha}, submodules=submodules)


def layer_spec(config: TransformerConfig, model: ModelConfig, aha: AHAConfig, layer: int) -> ModuleSpec:
    """Returns the spec of one layer (from 0, over the whole model), with its norms before or after blocks, or both."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm if model.traits.pre_norm else IdentityOp
    if model.traits.post_norm:
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(module=NormThenAdd, params={"config": config})
    parts.self_attention = attention_spec(parts.self_attention.submodules, model, aha, layer)
    return spec


def decoder_spec(
    config: TransformerConfig, model: ModelConfig, aha: AHAConfig, chunk: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the spec of this pipeline stage's layers, or of one chunk's, and of the final norm."""
    first = get_transformer_layer_offset(config, chunk)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=chunk))
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(config, model, aha, layer) for layer in layers], layer_norm=RMSNorm
    )


def _builder(module: type, **options: Any) -> Any:
    """Returns a function that builds the module; Megatron-core accepts a core attention in this form only."""

    def build(**kwargs: Any) -> Any:
        return module(**options, **kwargs)

    return build
