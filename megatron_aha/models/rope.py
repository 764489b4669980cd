"""Rotary frequencies of the supported scalings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_aha.config.model import ModelConfig, RopeScaling
from megatron_aha.errors import UserError, nearest

ROPE_SCALINGS = ("llama3", "linear")


def inverse_frequencies(model: ModelConfig) -> Tensor:
    """Returns the angle per position of each pair of dimensions, fp32 ``[head_dim / 2]`` (arXiv 2104.09864).

    Raises:
        UserError: when the scaling is unknown.
    """
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
    frequencies = 1.0 / (model.rope_theta**exponents)
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    raise UserError(
        f"--model.rope_scaling.kind {scaling.kind} is not one of {', '.join(ROPE_SCALINGS)}"
        + nearest(scaling.kind, ROPE_SCALINGS)
    )


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: long wavelengths divided by the factor, short ones kept, a linear ramp between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return (1 - ramp) * frequencies / scaling.factor + ramp * frequencies
