"""Rotary position settings in the two spellings of Hugging Face configurations."""

from __future__ import annotations

from typing import Any

from megatron_aha.config.model import RopeScaling
from megatron_aha.errors import UserError

DEFAULT_THETA = 10000.0

# Keys of each scaling beside its type: those our model knows, all required.
_SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# And those that may be left out.
_OPTIONAL: dict[str, tuple[str, ...]] = {"yarn": ("beta_fast", "beta_slow", "attention_factor")}
# Variants of a scaling that we do not compute, with the values that change nothing.
_VARIANTS: dict[str, tuple[Any, ...]] = {
    "mscale": (None,),
    "mscale_all_dim": (None,),
    "truncate": (None, True),
}


def read_rope(config: dict[str, Any], windowed_base: bool = False) -> tuple[float, RopeScaling | None]:
    """Returns the base and the scaling from a Hugging Face configuration.

    Until transformers 4 they are ``rope_theta`` and ``rope_scaling`` (whose type may be under ``type``), from
    5 on both are in ``rope_parameters``.

    Args:
        config: of the source.
        windowed_base: whether layers with a window may have another base, see ``read_windowed_theta``.

    Raises:
        UserError: the scaling is of a type that we do not have, or lacks a value.
    """
    new = config.get("rope_parameters")
    if new and (windowed_base or "full_attention" in new):
        new = _of_full_attention(new, windowed_base)
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
    if kind in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    missing = [key for key in _SCALINGS[kind] if parameters.get(key) is None]
    if missing:
        raise UserError(f"RoPE type '{kind}' lacks {', '.join(missing)} in the source's config.json")
    for key, allowed in _VARIANTS.items():
        if parameters.get(key) not in allowed:
            raise UserError(f"RoPE type '{kind}' with {key} = {parameters[key]} is not supported")
    stated = [key for key in _OPTIONAL.get(kind, ()) if parameters.get(key) is not None]
    values = {key: parameters[key] for key in (*_SCALINGS[kind], *stated)}
    return float(theta), RopeScaling(kind=kind, **values)


def read_windowed_theta(config: dict[str, Any]) -> float:
    """Returns the base of layers with a window, in a configuration of a family where they have one of their own."""
    windowed = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    return float(windowed.get("rope_theta") or config["rope_local_base_freq"])


def _of_full_attention(by_kind: dict[str, Any], windowed_base: bool) -> dict[str, Any]:
    """Returns the settings of layers with full attention; the others must have no scaling."""
    strangers = set(by_kind) - {"full_attention", "sliding_attention"}
    if strangers:
        raise UserError(
            f"rope_parameters with '{min(strangers)}' are not supported: this architecture has a set of them under "
            "full_attention and one under sliding_attention"
        )
    full = dict(by_kind.get("full_attention") or {})
    windowed = by_kind.get("sliding_attention") or {}
    theta, kind = windowed.get("rope_theta"), windowed.get("rope_type", "default")
    if kind != "default" or not (windowed_base or theta in (None, full.get("rope_theta"))):
        base = "" if windowed_base else f" and with the base of the others, {full.get('rope_theta')}"
        raise UserError(
            f"rope_parameters of sliding_attention, type '{kind}' and base {theta}, are not supported: layers with "
            f"a window must rotate without scaling{base}"
        )
    return full


def write_rope(
    theta: float, scaling: RopeScaling | None, by_layer_type: bool, windowed_theta: float | None = None
) -> dict[str, Any]:
    """Returns a dense model's entries, in the older spelling, which transformers 4.57 and 5 both read.

    Where rotary settings depend on the kind of layer, 5 would take another base than the stated one for layers
    with a window, so the newer spelling stands beside it.
    """
    older = {"rope_theta": theta, "rope_scaling": _scaling_entries(scaling)}
    if windowed_theta is not None:
        older["rope_local_base_freq"] = windowed_theta
    newer = write_rope_parameters(theta, scaling, True, windowed_theta) if by_layer_type else {}
    return {**older, **newer}


def write_rope_parameters(
    theta: float, scaling: RopeScaling | None, by_layer_type: bool, windowed_theta: float | None = None
) -> dict[str, Any]:
    """Returns the entry of a configuration with code of its own, in the newer spelling.

    The exported configuration translates it for 4.57. The older one would break ``AutoTokenizer`` of 5, which
    reads a configuration whose code it may not run as one without sizes, and then wants them for the scaling.
    """
    plain = {"rope_type": "default", "rope_theta": theta if windowed_theta is None else windowed_theta}
    scaled = {**(_scaling_entries(scaling) or {"rope_type": "default"}), "rope_theta": theta}
    if by_layer_type:
        return {"rope_parameters": {"full_attention": scaled, "sliding_attention": plain}}
    return {"rope_parameters": scaled}


def _scaling_entries(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    keys = (*_SCALINGS[scaling.kind], *_OPTIONAL.get(scaling.kind, ()))
    stated = {key: getattr(scaling, key) for key in keys if getattr(scaling, key) is not None}
    return {"rope_type": scaling.kind, **stated}
