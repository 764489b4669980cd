"""The table of contents of a checkpoint: which tensors exist, and which file holds which block of each."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megatron_aha.checkpoint.tensor_file import Deferred
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig, RopeScaling
from megatron_aha.errors import UserError

FORMAT = "megatron_aha"
VERSION = 1
INDEX_FILE = "index.json"
STATE_FILE = "state.json"
LATEST_FILE = "latest"
SOURCE_FOLDER = "source"
OPTIMIZER_PREFIX = "optimizer."
RNG_PREFIX = "rng."

FileRecord = dict[str, Any]
"""What one written file adds to the index, ready for JSON, so that ranks can gather their records:
``{"file": name, "bytes": n, "sha256": hex, "tensors": [{"name", "key", "dtype", "global_shape", "start",
"shape"}]}``."""

Config = TypeVar("Config", ModelConfig, AHAConfig, RopeScaling)


@dataclass
class Slice:
    """A rectangular block of a global tensor.

    Args:
        tensor: the block's values, on any device, or read when they are written.
        global_shape: shape of the whole tensor; None when the block is the whole tensor.
        start: index of the block's first element in the whole tensor; None means the origin.
    """

    tensor: torch.Tensor | Deferred
    global_shape: Sequence[int] | None = None
    start: Sequence[int] | None = None


def step_folder(step: int) -> str:
    """Returns the folder name of a step, ``step_00000010``."""
    return f"step_{step:08d}"


def step_of(folder: str) -> int | None:
    """Returns the step that a folder name stands for, or None for any other name."""
    match = re.fullmatch(r"step_(\d{8,})", folder)
    return int(match[1]) if match else None


def dtype_name(dtype: torch.dtype) -> str:
    """Returns ``float32`` for ``torch.float32``, and so on."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Returns ``torch.float32`` for ``float32``, and so on. Raises UserError for an unknown name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"this torch ({torch.__version__}) does not know the tensor type '{name}'")
    return dtype


def overlap(
    start: Sequence[int], shape: Sequence[int], other_start: Sequence[int], other_shape: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Returns first and one-past-last index of what two blocks share, or None when they share nothing."""
    first = [max(a, b) for a, b in zip(start, other_start, strict=True)]
    last = [min(a + n, b + m) for a, n, b, m in zip(start, shape, other_start, other_shape, strict=True)]
    if any(low >= high for low, high in zip(first, last, strict=True)):
        return None
    return first, last


def merge_records(records: Sequence[FileRecord]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Joins the file records of all writers into the index's ``tensors`` and ``files``.

    Raises:
        ValueError: two writers disagree about a tensor, or its blocks overlap or leave a hole (a bug of the
            writer).
    """
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for record in records:
        if record["file"] in files:
            raise ValueError(f"two writers wrote the same file {record['file']}")
        files[record["file"]] = {"bytes": record["bytes"], "sha256": record["sha256"]}
        for block in record["tensors"]:
            shape, dtype = list(block["global_shape"]), block["dtype"]
            entry = tensors.setdefault(block["name"], {"shape": shape, "dtype": dtype, "slices": []})
            if (entry["shape"], entry["dtype"]) != (shape, dtype):
                raise ValueError(
                    f"writers disagree about {block['name']}: "
                    f"{entry['shape']} {entry['dtype']} and {shape} {dtype}"
                )
            entry["slices"].append(
                {
                    "file": record["file"],
                    "key": block["key"],
                    "start": block["start"],
                    "shape": block["shape"],
                }
            )
    for name, entry in tensors.items():
        _check_coverage(name, entry)
    return dict(sorted(tensors.items())), dict(sorted(files.items()))


def _check_coverage(name: str, entry: dict[str, Any]) -> None:
    shape, slices = entry["shape"], entry["slices"]
    for block in slices:
        if not len(block["start"]) == len(block["shape"]) == len(shape) or any(
            low < 0 or low + size > whole
            for low, size, whole in zip(block["start"], block["shape"], shape, strict=True)
        ):
            raise ValueError(f"{name} {shape}: block {block['shape']} at {block['start']} lies outside it")
    for one, two in itertools.combinations(slices, 2):
        if overlap(one["start"], one["shape"], two["start"], two["shape"]):
            raise ValueError(f"{name} {shape}: blocks at {one['start']} and {two['start']} overlap")
    covered = sum(math.prod(block["shape"]) for block in slices)
    if covered != math.prod(shape):
        raise ValueError(f"{name} {shape}: blocks hold {covered} of {math.prod(shape)} elements")


def model_from_dict(values: dict[str, Any]) -> ModelConfig:
    """Returns the ModelConfig that was stored as `values`. Raises UserError on unknown fields."""
    values = dict(values)
    if values.get("rope_scaling") is not None:
        values["rope_scaling"] = _from_dict(RopeScaling, values["rope_scaling"])
    return _from_dict(ModelConfig, values)


def aha_from_dict(values: dict[str, Any] | None) -> AHAConfig | None:
    """Returns the AHAConfig of a checkpoint, None for a dense one. Raises UserError on unknown fields."""
    return None if values is None else _from_dict(AHAConfig, values)


def _from_dict(kind: type[Config], values: dict[str, Any]) -> Config:
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UserError(
            f"the checkpoint's {kind.__name__} has options this version does not know: {', '.join(unknown)}; "
            "read it with the megatron_aha that wrote it, or a newer one"
        )
    return kind(**values)
