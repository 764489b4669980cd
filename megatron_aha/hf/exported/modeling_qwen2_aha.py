"""Qwen2 with All-or-Here Attention (arXiv 2512.22562), for transformers 4.57 to 5."""

from __future__ import annotations

from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2ForCausalLM,
    Qwen2MLP,
    Qwen2Model,
    Qwen2PreTrainedModel,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
)

from .configuration_qwen2_aha import Qwen2AHAConfig
from .modeling_aha import AHAAttention, AHACausalLM, AHADecoder, AHAPreTrained, PreNormLayer


class Qwen2AHAAttention(AHAAttention):
    """Qwen2's projections; each token of each head sees *all* keys or those *here*."""

    qkv_bias = True


class Qwen2AHADecoderLayer(PreNormLayer):
    """Qwen2's decoder layer."""

    attention_class = Qwen2AHAAttention
    mlp_class = Qwen2MLP
    norm_class = Qwen2RMSNorm


class Qwen2AHAPreTrainedModel(AHAPreTrained, Qwen2PreTrainedModel):
    """What both models share."""

    config_class = Qwen2AHAConfig
    _no_split_modules = ["Qwen2AHADecoderLayer"]


class Qwen2AHAModel(AHADecoder, Qwen2AHAPreTrainedModel, Qwen2Model):
    """The decoder without its head."""

    layer_class = Qwen2AHADecoderLayer
    norm_class = Qwen2RMSNorm
    rotary_class = Qwen2RotaryEmbedding


class Qwen2AHAForCausalLM(AHACausalLM, Qwen2AHAPreTrainedModel, Qwen2ForCausalLM):
    """The language model; everything but the attention is transformers' Qwen2."""

    decoder_class = Qwen2AHAModel


Qwen2AHAModel.register_for_auto_class("AutoModel")
Qwen2AHAForCausalLM.register_for_auto_class("AutoModelForCausalLM")
