"""Rotary position settings in the two spellings of Hugging Face configurations."""

from __future__ import annotations

from typing import Any

from megatron_aha.config.model import RopeScaling
from megatron_aha.errors import UserError

DEFAULT_THETA = 10000.0

# Keys of each scaling beside its type: those our model knows, all required.
_SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns the base and the scaling from a Hugging Face configuration.

    Until transformers 4 they are ``rope_theta`` and ``rope_scaling`` (whose type may be under ``type``), from
    5 on both are in ``rope_parameters``.

    Raises:
        UserError: the scaling is of a type that we do not have, or lacks a value.
    """
    new = config.get("rope_parameters")
    parameters = dict(new or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None)
    if theta is None:
        theta = config.get("rope_theta") or DEFAULT_THETA
    partial = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UserError(
            f"partial_rotary_factor {partial} is not supported: every dimension of a head is rotated"
        )
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if kind == "default":
        return float(theta), None
    if kind not in _SCALINGS:
        raise UserError(f"RoPE type '{kind}' is not supported; supported are default, {', '.join(_SCALINGS)}")
    if kind == "llama3":
        parameters.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    missing = [key for key in _SCALINGS[kind] if parameters.get(key) is None]
    if missing:
        raise UserError(f"RoPE type '{kind}' lacks {', '.join(missing)} in the source's config.json")
    return float(theta), RopeScaling(kind=kind, **{key: parameters[key] for key in _SCALINGS[kind]})


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns a plain Llama's entries, in the older spelling, which transformers 4.57 and 5 both read."""
    return {"rope_theta": theta, "rope_scaling": _scaling_entries(scaling)}


def write_rope_parameters(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the entry of a configuration with code of its own, in the newer spelling.

    ``LlamaAHAConfig`` translates it for 4.57. The older one would break ``AutoTokenizer`` of 5, which reads a
    configuration whose code it may not run as one without sizes, and then wants them for the scaling.
    """
    entries = _scaling_entries(scaling) or {"rope_type": "default"}
    return {"rope_parameters": {**entries, "rope_theta": theta}}


def _scaling_entries(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {"rope_type": scaling.kind, **{key: getattr(scaling, key) for key in _SCALINGS[scaling.kind]}}
