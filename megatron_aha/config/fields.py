"""The tree of options from outside: which dotted names exist, of which type, and what a wrong name meant."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from typing import Any

from megatron_aha.config.run import RunConfig
from megatron_aha.errors import nearest

# Names that other trainers use for the same quantity; they only ever serve a hint, never an alias.
FOREIGN_NAMES = {
    "learning_rate": "training.lr",
    "max_steps": "training.train_steps",
    "train_iters": "training.train_steps",
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "cp": "parallel.context_parallel_size",
    "num_hidden_layers": "model.num_layers",
    "intermediate_size": "model.ffn_hidden_size",
    "num_key_value_heads": "model.num_query_groups",
    "kv_channels": "model.head_dim",
    "sliding_window": "aha.window",
    "data_path": "data.blend",
    "tensorboard_dir": "logging.directory",
    "load": "checkpoint.init_from",
    "save": "checkpoint.directory",
}


def section_class(annotation: Any) -> Any:
    """Returns the dataclass behind ``Section`` or ``Section | None``, or None for a plain value."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def accepts_none(annotation: Any) -> bool:
    """Returns whether ``null`` is a value of this type."""
    return isinstance(annotation, types.UnionType) and type(None) in typing.get_args(annotation)


def is_mapping(annotation: Any) -> bool:
    """Returns whether the option is a free mapping, whose keys we do not know (``training.deepspeed``)."""
    return typing.get_origin(annotation) is dict


@functools.cache
def all_fields() -> dict[str, Any]:
    """Returns every dotted name, of sections and of options, with its resolved type annotation."""
    found: dict[str, Any] = {}

    def walk(cls: type, prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            name = prefix + field.name
            found[name] = hints[field.name]
            section = section_class(hints[field.name])
            if section is not None:
                walk(section, name + ".")

    walk(RunConfig, "")
    return found


def describe_type(annotation: Any) -> str:
    """Returns what a value of this type looks like, for a sentence: ``a whole number`` ..."""
    if accepts_none(annotation):
        inner = next(option for option in typing.get_args(annotation) if option is not type(None))
        return f"{describe_type(inner)} or null"
    if section_class(annotation) is not None or is_mapping(annotation):
        return "a mapping of options"
    if typing.get_origin(annotation) is list:
        return "a list of texts"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[annotation]


def suggest(name: str) -> str:
    """Returns a hint ``"; did you mean 'x'?"`` for an unknown dotted name, or an empty string."""
    fields = all_fields()
    *sections, last = name.split(".")
    if last in FOREIGN_NAMES:
        return f"; did you mean '{FOREIGN_NAMES[last]}'?"
    elsewhere = [known for known in fields if known.split(".")[-1] == last]
    if elsewhere:
        # a section mistyped: `trainig.lr` is not `aha.lr`
        alike = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.0) if sections else elsewhere
        closest = alike[0]
        return f"; did you mean '{closest}'?"
    parent = ".".join(sections)
    siblings = [known for known in fields if known.rpartition(".")[0] == parent]
    return nearest(name, siblings) if siblings and parent else nearest(name, fields)
