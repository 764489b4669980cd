"""Llama with All-or-Here Attention (arXiv 2512.22562), for transformers 4.57 to 5."""

from __future__ import annotations

from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from .configuration_llama_aha import LlamaAHAConfig
from .modeling_aha import AHAAttention, AHACausalLM, AHADecoder, AHAPreTrained, PreNormLayer


class LlamaAHAAttention(AHAAttention):
    """Llama's projections; each token of each head sees *all* keys or those *here*."""


class LlamaAHADecoderLayer(PreNormLayer):
    """Llama's decoder layer."""

    attention_class = LlamaAHAAttention
    mlp_class = LlamaMLP
    norm_class = LlamaRMSNorm


class LlamaAHAPreTrainedModel(AHAPreTrained, LlamaPreTrainedModel):
    """What both models share."""

    config_class = LlamaAHAConfig
    _no_split_modules = ["LlamaAHADecoderLayer"]


class LlamaAHAModel(AHADecoder, LlamaAHAPreTrainedModel, LlamaModel):
    """The decoder without its head."""

    layer_class = LlamaAHADecoderLayer
    norm_class = LlamaRMSNorm
    rotary_class = LlamaRotaryEmbedding


class LlamaAHAForCausalLM(AHACausalLM, LlamaAHAPreTrainedModel, LlamaForCausalLM):
    """The language model; everything but the attention is transformers' Llama."""

    decoder_class = LlamaAHAModel


LlamaAHAModel.register_for_auto_class("AutoModel")
LlamaAHAForCausalLM.register_for_auto_class("AutoModelForCausalLM")
