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
        post_norm: attention and MLP read the residual stream as it is, and their outputs are normalised.
        scales_windowed_layers: the RoPE scaling holds for layers with a static window too.
    """

    qkv_bias: bool = False
    qk_norm: str = "none"
    post_norm: bool = False
    scales_windowed_layers: bool = True


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm="head"),
    "olmo2": Family(qk_norm="projection", post_norm=True),
    "olmo3": Family(qk_norm="projection", post_norm=True, scales_windowed_layers=False),
}
