"""What a decoder is made of: the sizes and options that a checkpoint fixes and training may not change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_aha.config.families import FAMILIES, Family


@dataclass
class RopeScaling:
    """Rotary frequency scaling, under the names that Hugging Face configurations use.

    Args:
        kind: ``llama3`` (Llama 3.1 and later: wavelength-dependent), ``yarn``, ``linear``, or ``dynamic`` (which
            changes nothing up to ``max_position_embeddings``, the longest sequence that can be trained).
        factor: how many times longer the scaled context is.
        low_freq_factor: llama3 only: wavelengths above original length / this are divided by ``factor``.
        high_freq_factor: llama3 only: wavelengths below original length / this are left alone.
        original_max_position_embeddings: llama3 and yarn: context length in tokens before scaling.
        beta_fast: yarn only: pairs that turn more often than this within that length are left alone.
        beta_slow: yarn only: pairs that turn less often than this are divided by ``factor``.
        attention_factor: yarn only: factor on rotated queries and keys; None takes ``0.1 ln(factor) + 1``.
    """

    kind: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass
class ModelConfig:
    """Sizes of the decoder; all counts are global, never per rank.

    Args:
        family: the family of models it belongs to (see ``megatron_aha.models``).
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        ffn_hidden_size: width of the MLP's gated product (Hugging Face ``intermediate_size``).
        num_attention_heads: query heads.
        num_query_groups: key/value heads; equal to the query heads without GQA.
        head_dim: width of one head (Megatron ``kv_channels``).
        vocab_size: rows of the embedding, without any padding for tensor parallelism.
        max_position_embeddings: longest context in tokens.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: scaling of the rotary frequencies, or none.
        windowed_rope_theta: base in the layers of ``windowed_layers``; None takes ``rope_theta``
            (``gemma3_text`` only).
        query_pre_attn_scalar: attention scores are divided by its square root; None takes ``head_dim``
            (``gemma3_text`` only).
        tied_embeddings: the output layer shares the embedding's weight.
        init_std: standard deviation of randomly initialised weights.
        attention_dropout: dropout on attention probabilities; kept for the record, only 0 is supported.
        hidden_dropout: dropout after attention and MLP.
        static_window: keys that the layers of ``windowed_layers`` see, in tokens, including the token itself.
        windowed_layers: layers, from 0, that see a static window only and have no router.
    """

    family: str = "llama"
    num_layers: int = 2
    hidden_size: int = 64
    ffn_hidden_size: int = 128
    num_attention_heads: int = 4
    num_query_groups: int = 2
    head_dim: int = 16
    vocab_size: int = 301
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    windowed_rope_theta: float | None = None
    query_pre_attn_scalar: int | None = None
    tied_embeddings: bool = True
    init_std: float = 0.02
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    static_window: int | None = None
    windowed_layers: list[int] = field(default_factory=list)

    @property
    def traits(self) -> Family:
        """Where the family's layers differ from Llama's."""
        return FAMILIES[self.family]

    @property
    def routed_layers(self) -> list[int]:
        """Layers, from 0, with full attention, which is where All-or-Here Attention goes."""
        return [layer for layer in range(self.num_layers) if layer not in self.windowed_layers]

    @property
    def softmax_scale(self) -> float:
        """Factor on the products of queries and keys."""
        return 1 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    def window_of(self, layer: int) -> int | None:
        """Returns the static window of a layer (from 0) in tokens, None where attention is full."""
        return self.static_window if layer in self.windowed_layers else None
