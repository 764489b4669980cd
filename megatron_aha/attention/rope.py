"""Rotary frequencies of the supported scalings, per layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_aha.config.model import ModelConfig, RopeScaling
from megatron_aha.config.names import ROPE_SCALINGS
from megatron_aha.errors import UserError, nearest


def layer_theta(model: ModelConfig, layer: int) -> float:
    """Returns the base of a layer (from 0); windowed layers may have one of their own."""
    own = model.windowed_rope_theta
    return model.rope_theta if own is None or model.window_of(layer) is None else own


def layer_scaling(model: ModelConfig, layer: int) -> RopeScaling | None:
    """Returns the scaling of a layer (from 0); some families leave their windowed layers unscaled."""
    if model.window_of(layer) is not None and not model.traits.scales_windowed_layers:
        return None
    return model.rope_scaling


def inverse_frequencies(
    model: ModelConfig, scaling: RopeScaling | None, theta: float | None = None
) -> Tensor:
    """Returns the angle per position of each pair of dimensions, fp32 ``[head_dim / 2]`` (arXiv 2104.09864).

    Args:
        model: width of a head, and the base.
        scaling: None for the plain frequencies.
        theta: base; None takes the model's.

    Raises:
        UserError: when the scaling is unknown.
    """
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
    theta = model.rope_theta if theta is None else theta
    frequencies = 1.0 / (theta**exponents)
    # what dynamic scaling would change begins beyond the longest sequence that may be trained
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, model.head_dim, theta)
    raise UserError(
        f"--model.rope_scaling.kind {scaling.kind} is not one of {', '.join(ROPE_SCALINGS)}"
        + nearest(scaling.kind, ROPE_SCALINGS)
    )


def rotation_scale(scaling: RopeScaling | None) -> float:
    """Returns the factor on rotated queries and keys; only yarn has one other than 1 (arXiv 2309.00071, eq. 22)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def angles_at(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Returns the angles ``[tokens, 1, 1, head_dim]`` in Megatron-core's layout, from positions ``[tokens]``."""
    angles = positions.float()[:, None] * frequencies.to(positions.device)
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: long wavelengths divided by the factor, short ones kept, a linear ramp between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return (1 - ramp) * frequencies / scaling.factor + ramp * frequencies


def _yarn(frequencies: Tensor, scaling: RopeScaling, head_dim: int, theta: float) -> Tensor:
    """YaRN (arXiv 2309.00071): as llama3, but the ramp is linear in the index of the pair, between whole indices."""

    def pair_that_turns(times: float) -> float:
        length = scaling.original_max_position_embeddings
        return head_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    ramp = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return ramp * frequencies / scaling.factor + (1 - ramp) * frequencies
