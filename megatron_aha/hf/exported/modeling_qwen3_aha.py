"""Qwen3 with All-or-Here Attention (arXiv 2512.22562), for transformers 4.57 to 5."""

from __future__ import annotations

from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3ForCausalLM,
    Qwen3MLP,
    Qwen3Model,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from .configuration_qwen3_aha import Qwen3AHAConfig
from .modeling_aha import AHAAttention, AHACausalLM, AHADecoder, AHAPreTrained, PreNormLayer


class Qwen3AHAAttention(AHAAttention):
    """Qwen3's projections; each token of each head sees *all* keys or those *here*."""

    qk_norm = "head"
    norm_class = Qwen3RMSNorm


class Qwen3AHADecoderLayer(PreNormLayer):
    """Qwen3's decoder layer."""

    attention_class = Qwen3AHAAttention
    mlp_class = Qwen3MLP
    norm_class = Qwen3RMSNorm


class Qwen3AHAPreTrainedModel(AHAPreTrained, Qwen3PreTrainedModel):
    """What both models share."""

    config_class = Qwen3AHAConfig
    _no_split_modules = ["Qwen3AHADecoderLayer"]


class Qwen3AHAModel(AHADecoder, Qwen3AHAPreTrainedModel, Qwen3Model):
    """The decoder without its head."""

    layer_class = Qwen3AHADecoderLayer
    norm_class = Qwen3RMSNorm
    rotary_class = Qwen3RotaryEmbedding


class Qwen3AHAForCausalLM(AHACausalLM, Qwen3AHAPreTrainedModel, Qwen3ForCausalLM):
    """The language model; everything but the attention is transformers' Qwen3."""

    decoder_class = Qwen3AHAModel


Qwen3AHAModel.register_for_auto_class("AutoModel")
Qwen3AHAForCausalLM.register_for_auto_class("AutoModelForCausalLM")
