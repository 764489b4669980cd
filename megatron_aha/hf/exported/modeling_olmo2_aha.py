"""Olmo2 with All-or-Here Attention (arXiv 2512.22562), for transformers 4.57 to 5."""

from __future__ import annotations

from transformers.models.olmo2.modeling_olmo2 import (
    Olmo2ForCausalLM,
    Olmo2MLP,
    Olmo2Model,
    Olmo2PreTrainedModel,
    Olmo2RMSNorm,
    Olmo2RotaryEmbedding,
)

from .configuration_olmo2_aha import Olmo2AHAConfig
from .modeling_aha import AHAAttention, AHACausalLM, AHADecoder, AHAPreTrained, PostNormLayer


class Olmo2AHAAttention(AHAAttention):
    """Olmo2's projections; each token of each head sees *all* keys or those *here*."""

    qk_norm = "projection"
    norm_class = Olmo2RMSNorm


class Olmo2AHADecoderLayer(PostNormLayer):
    """Olmo2's decoder layer."""

    attention_class = Olmo2AHAAttention
    mlp_class = Olmo2MLP
    norm_class = Olmo2RMSNorm


class Olmo2AHAPreTrainedModel(AHAPreTrained, Olmo2PreTrainedModel):
    """What both models share."""

    config_class = Olmo2AHAConfig
    _no_split_modules = ["Olmo2AHADecoderLayer"]


class Olmo2AHAModel(AHADecoder, Olmo2AHAPreTrainedModel, Olmo2Model):
    """The decoder without its head."""

    layer_class = Olmo2AHADecoderLayer
    norm_class = Olmo2RMSNorm
    rotary_class = Olmo2RotaryEmbedding


class Olmo2AHAForCausalLM(AHACausalLM, Olmo2AHAPreTrainedModel, Olmo2ForCausalLM):
    """The language model; everything but the attention is transformers' Olmo2."""

    decoder_class = Olmo2AHAModel


Olmo2AHAModel.register_for_auto_class("AutoModel")
Olmo2AHAForCausalLM.register_for_auto_class("AutoModelForCausalLM")
