"""Gemma3's text model with All-or-Here Attention (arXiv 2512.22562), for transformers 4.57 to 5."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3ForCausalLM,
    Gemma3MLP,
    Gemma3PreTrainedModel,
    Gemma3RMSNorm,
    Gemma3RotaryEmbedding,
    Gemma3TextModel,
    Gemma3TextScaledWordEmbedding,
)

from .configuration_gemma3_text_aha import Gemma3AHAConfig
from .modeling_aha import FULL, WINDOWED, AHAAttention, AHACausalLM, AHADecoder, AHALayer, AHAPreTrained


class Gemma3AHAAttention(AHAAttention):
    """Gemma3's projections; each token of each head sees *all* keys or those *here*."""

    qk_norm = "head"
    norm_class = Gemma3RMSNorm

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.scaling = config.query_pre_attn_scalar**-0.5


class Gemma3AHADecoderLayer(AHALayer):
    """Gemma3's decoder layer: attention and MLP read and add normalised states."""

    attention_class = Gemma3AHAAttention
    mlp_class = Gemma3MLP

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Gemma3RMSNorm(size, eps=eps)
        self.post_attention_layernorm = Gemma3RMSNorm(size, eps=eps)
        self.pre_feedforward_layernorm = Gemma3RMSNorm(size, eps=eps)
        self.post_feedforward_layernorm = Gemma3RMSNorm(size, eps=eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns hidden states ``[batch, queries, hidden]``, attention weights or None, router logits."""
        attended, weights, logits = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        transformed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        hidden_states = hidden_states + self.post_feedforward_layernorm(transformed)
        return hidden_states, weights, logits


class Gemma3AHAPreTrainedModel(AHAPreTrained, Gemma3PreTrainedModel):
    """What both models share."""

    config_class = Gemma3AHAConfig
    base_model_prefix = "model"
    _no_split_modules = ["Gemma3AHADecoderLayer"]


class Gemma3AHAModel(AHADecoder, Gemma3AHAPreTrainedModel, Gemma3TextModel):
    """The decoder without its head."""

    layer_class = Gemma3AHADecoderLayer
    norm_class = Gemma3RMSNorm
    rotary_class = Gemma3RotaryEmbedding

    def make_embedding(self, config: Any) -> nn.Module:
        """Returns the table of token embeddings, scaled when they are read."""
        scale = config.hidden_size**0.5
        return Gemma3TextScaledWordEmbedding(
            config.vocab_size, config.hidden_size, config.pad_token_id, embed_scale=scale
        )

    def add_rotary_embedding(self) -> None:
        """Builds one table for both kinds of layers, or under transformers 4 one for each."""
        if takes_layer_type(Gemma3RotaryEmbedding):
            self.rotary_emb = Gemma3RotaryEmbedding(config=self.config)
            return
        local = copy.deepcopy(self.config)
        local.rope_theta, local.rope_scaling = local.rope_local_base_freq, {"rope_type": "default"}
        tables = {
            FULL: Gemma3RotaryEmbedding(config=self.config),
            WINDOWED: Gemma3RotaryEmbedding(config=local),
        }
        self.rotary_embs = nn.ModuleDict(tables)

    def angles(self, hidden_states: Tensor, position_ids: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine for a kind of layers."""
        if takes_layer_type(Gemma3RotaryEmbedding):
            return self.rotary_emb(hidden_states, position_ids, kind)
        return self.rotary_embs[kind](hidden_states, position_ids)


def takes_layer_type(rotary_class: type[nn.Module]) -> bool:
    """Returns whether one table serves all kinds of layers, as from transformers 5 on."""
    return "layer_type" in inspect.signature(rotary_class.forward).parameters


class Gemma3AHAForCausalLM(AHACausalLM, Gemma3AHAPreTrainedModel, Gemma3ForCausalLM):
    """The language model; everything but the attention is transformers' Gemma3."""

    decoder_class = Gemma3AHAModel
    base_model_prefix = "model"


Gemma3AHAModel.register_for_auto_class("AutoModel")
Gemma3AHAForCausalLM.register_for_auto_class("AutoModelForCausalLM")
