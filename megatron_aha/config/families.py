"""The families of decoders, and where each one's layers differ from Llama's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """What the layers of a family have beside RMSNorm, RoPE, grouped queries and SwiGLU.

    Args:
        qkv_bias: biases on the query, key and value projections.
        qk_norm: RMSNorm of queries and keys before they are rotated: ``none``, ``head`` (of each head, with one
            weight for all) or ``projection`` (over all heads at once, each with its own part of the weight).
        pre_norm: attention and MLP read the residual stream normalised.
        post_norm: their outputs are normalised before they join it.
        zero_centred_norms: every norm multiplies by 1 + weight.
        scaled_embeddings: embeddings are multiplied by ``sqrt(hidden_size)``; the output layer's weight is not.
        activation: of the MLP's gate: ``silu``, or ``gelu_tanh`` (GELU by its tanh approximation).
        scales_windowed_layers: the RoPE scaling holds for layers with a static window too.
        settings: further fields of the model's configuration that this family may set.
    """

    qkv_bias: bool = False
    qk_norm: str = "none"
    pre_norm: bool = True
    post_norm: bool = False
    zero_centred_norms: bool = False
    scaled_embeddings: bool = False
    activation: str = "silu"
    scales_windowed_layers: bool = True
    settings: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm="head"),
    "olmo2": Family(qk_norm="projection", pre_norm=False, post_norm=True),
    "olmo3": Family(qk_norm="projection", pre_norm=False, post_norm=True, scales_windowed_layers=False),
    "gemma3_text": Family(
        qk_norm="head",
        post_norm=True,
        zero_centred_norms=True,
        scaled_embeddings=True,
        activation="gelu_tanh",
        scales_windowed_layers=False,
        settings=("windowed_rope_theta", "query_pre_attn_scalar"),
    ),
}
