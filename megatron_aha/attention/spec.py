"""Layer specs: Megatron-core's own layer with our norm and attention in their places."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_aha.attention.core import AHACoreAttention, DenseCoreAttention
from megatron_aha.attention.self_attention import AHASelfAttention, PackedSelfAttention
from megatron_aha.config.aha import AHAConfig
from megatron_aha.parallel.norm import RMSNorm


def attention_spec(submodules: object, aha: AHAConfig) -> ModuleSpec:
    """Returns the self-attention of a layer: AHA when enabled, else dense.

    Args:
        submodules: Megatron-core's ``SelfAttentionSubmodules`` with the projections; its core attention is replaced.
        aha: the attention variant. A further variant is one more branch here.
    """
    params: dict[str, object] = {"attn_mask_type": AttnMaskType.causal}
    if not aha.enabled:
        submodules.core_attention = DenseCoreAttention  # type: ignore[attr-defined]
        return ModuleSpec(module=PackedSelfAttention, params=params, submodules=submodules)

    def core_attention(**kwargs: object) -> AHACoreAttention:
        return AHACoreAttention(aha=aha, **kwargs)  # type: ignore[arg-type]

    submodules.core_attention = core_attention  # type: ignore[attr-defined]
    return ModuleSpec(module=AHASelfAttention, params={**params, "aha": aha}, submodules=submodules)


def decoder_spec(
    config: TransformerConfig, aha: AHAConfig, chunk: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the spec of this pipeline stage's layers, or of one chunk's, and of the final norm."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention = attention_spec(layer.submodules.self_attention.submodules, aha)
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=chunk), layer_norm=RMSNorm
    )
