"""What a checkpoint says about the model goes before the defaults, and never against what the user stated."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.errors import UserError

# How to train, not what the weights are: a run may choose these anew.
FREE_IN_MODEL = {"init_std", "attention_dropout", "hidden_dropout"}
# What the trained router means; the other options of the section belong to the run.
KEPT_IN_AHA = ["enabled", "window", "num_sink_tokens", "granularity", "bias"]
# The router's weights have this shape and no other.
FIXED_IN_AHA = {"granularity", "bias"}


def take_model_from_checkpoint(
    config: RunConfig, explicit: set[str], model: ModelConfig, aha: AHAConfig | None
) -> RunConfig:
    """Returns a copy of the configuration with the checkpoint's model where the user stated nothing.

    Args:
        config: the run as parsed.
        explicit: dotted names that the user stated, from ``parse_run``.
        model: sizes in the checkpoint.
        aha: attention in the checkpoint; None for a dense one, which takes any.

    Raises:
        UserError: a stated value contradicts the checkpoint; the sentence has both and, one a line, all of
            them.
    """
    merged = copy.deepcopy(config)
    conflicts: list[str] = []
    for field in dataclasses.fields(ModelConfig):
        fixed = field.name not in FREE_IN_MODEL
        _take(merged.model, model, field.name, "model", explicit, fixed, conflicts)
    if aha is not None:
        for name in KEPT_IN_AHA:
            _take(merged.aha, aha, name, "aha", explicit, name in FIXED_IN_AHA, conflicts)
    if conflicts:
        raise UserError("\n".join(conflicts))
    return merged


def model_difference(one: ModelConfig, other: ModelConfig) -> tuple[str, str, str] | None:
    """Returns the first option in which the weights of two models differ, with both values, or None."""
    for field in dataclasses.fields(ModelConfig):
        values = getattr(one, field.name), getattr(other, field.name)
        if field.name not in FREE_IN_MODEL and values[0] != values[1]:
            return field.name, _shown(values[0]), _shown(values[1])
    return None


def _take(
    ours: Any, theirs: Any, name: str, section: str, explicit: set[str], fixed: bool, conflicts: list[str]
) -> None:
    dotted = f"{section}.{name}"
    value = getattr(theirs, name)
    stated = any(known == dotted or known.startswith(dotted + ".") for known in explicit)
    if not stated:
        setattr(ours, name, copy.deepcopy(value))
    elif fixed and getattr(ours, name) != value:
        conflicts.append(
            f"--{dotted} is {_shown(getattr(ours, name))}, but the checkpoint has {_shown(value)}; leave "
            "the option out to take the checkpoint's, or name a checkpoint of that model"
        )


def _shown(value: Any) -> str:
    return str(dataclasses.asdict(value)) if dataclasses.is_dataclass(value) else str(value)  # type: ignore[arg-type]
