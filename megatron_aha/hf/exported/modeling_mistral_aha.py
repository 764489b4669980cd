"""Mistral with All-or-Here Attention (arXiv 2512.22562), for transformers 4.57 to 5."""

from __future__ import annotations

from transformers.models.mistral.modeling_mistral import (
    MistralForCausalLM,
    MistralMLP,
    MistralModel,
    MistralPreTrainedModel,
    MistralRMSNorm,
    MistralRotaryEmbedding,
)

from .configuration_mistral_aha import MistralAHAConfig
from .modeling_aha import AHAAttention, AHACausalLM, AHADecoder, AHAPreTrained, PreNormLayer


class MistralAHAAttention(AHAAttention):
    """Mistral's projections; each token of each head sees *all* keys or those *here*."""


class MistralAHADecoderLayer(PreNormLayer):
    """Mistral's decoder layer."""

    attention_class = MistralAHAAttention
    mlp_class = MistralMLP
    norm_class = MistralRMSNorm


class MistralAHAPreTrainedModel(AHAPreTrained, MistralPreTrainedModel):
    """What both models share."""

    config_class = MistralAHAConfig
    _no_split_modules = ["MistralAHADecoderLayer"]


class MistralAHAModel(AHADecoder, MistralAHAPreTrainedModel, MistralModel):
    """The decoder without its head."""

    layer_class = MistralAHADecoderLayer
    norm_class = MistralRMSNorm
    rotary_class = MistralRotaryEmbedding


class MistralAHAForCausalLM(AHACausalLM, MistralAHAPreTrainedModel, MistralForCausalLM):
    """The language model; everything but the attention is transformers' Mistral."""

    decoder_class = MistralAHAModel


MistralAHAModel.register_for_auto_class("AutoModel")
MistralAHAForCausalLM.register_for_auto_class("AutoModelForCausalLM")
