"""Olmo3 with All-or-Here Attention (arXiv 2512.22562), for transformers 4.57 to 5."""

from __future__ import annotations

import inspect

from torch import Tensor, nn
from transformers.models.olmo3.modeling_olmo3 import (
    Olmo3ForCausalLM,
    Olmo3MLP,
    Olmo3Model,
    Olmo3PreTrainedModel,
    Olmo3RMSNorm,
    Olmo3RotaryEmbedding,
)

from .configuration_olmo3_aha import Olmo3AHAConfig
from .modeling_aha import (
    FULL,
    WINDOWED,
    AHAAttention,
    AHACausalLM,
    AHADecoder,
    AHAPreTrained,
    PostNormLayer,
)


class Olmo3AHAAttention(AHAAttention):
    """Olmo3's projections; each token of each head sees *all* keys or those *here*."""

    qk_norm = "projection"
    norm_class = Olmo3RMSNorm


class Olmo3AHADecoderLayer(PostNormLayer):
    """Olmo3's decoder layer."""

    attention_class = Olmo3AHAAttention
    mlp_class = Olmo3MLP
    norm_class = Olmo3RMSNorm


class Olmo3AHAPreTrainedModel(AHAPreTrained, Olmo3PreTrainedModel):
    """What both models share."""

    config_class = Olmo3AHAConfig
    _no_split_modules = ["Olmo3AHADecoderLayer"]


class Olmo3AHAModel(AHADecoder, Olmo3AHAPreTrainedModel, Olmo3Model):
    """The decoder without its head."""

    layer_class = Olmo3AHADecoderLayer
    norm_class = Olmo3RMSNorm
    rotary_class = Olmo3RotaryEmbedding

    def add_rotary_embedding(self) -> None:
        """Builds one table for both kinds of layers, or under transformers 4 one for each."""
        if takes_layer_type(Olmo3RotaryEmbedding):
            self.rotary_emb = Olmo3RotaryEmbedding(config=self.config)
            return
        # the scaling holds for layers with full attention alone
        tables = {WINDOWED: Olmo3RotaryEmbedding(config=self.config, rope_type="default")}
        self.rotary_embs = nn.ModuleDict({FULL: Olmo3RotaryEmbedding(config=self.config), **tables})

    def angles(self, hidden_states: Tensor, position_ids: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine for a kind of layers."""
        if takes_layer_type(Olmo3RotaryEmbedding):
            return self.rotary_emb(hidden_states, position_ids, kind)
        return self.rotary_embs[kind](hidden_states, position_ids)


def takes_layer_type(rotary_class: type[nn.Module]) -> bool:
    """Returns whether one table serves all kinds of layers, as from transformers 5 on."""
    return "layer_type" in inspect.signature(rotary_class.forward).parameters


class Olmo3AHAForCausalLM(AHACausalLM, Olmo3AHAPreTrainedModel, Olmo3ForCausalLM):
    """The language model; everything but the attention is transformers' Olmo3."""

    decoder_class = Olmo3AHAModel


Olmo3AHAModel.register_for_auto_class("AutoModel")
Olmo3AHAForCausalLM.register_for_auto_class("AutoModelForCausalLM")
