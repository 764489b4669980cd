"""Reading a checkpoint: any block of any tensor, whichever ranks wrote it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_aha.checkpoint.atomic import remove_folder, sha256
from megatron_aha.checkpoint.index import (
    FORMAT,
    INDEX_FILE,
    LATEST_FILE,
    OPTIMIZER_PREFIX,
    RNG_PREFIX,
    SOURCE_FOLDER,
    STATE_FILE,
    VERSION,
    aha_from_dict,
    dtype_of,
    model_from_dict,
    overlap,
    step_folder,
    step_of,
)
from megatron_aha.errors import UserError, nearest

logger = logging.getLogger(__name__)


class CheckpointReader:
    """Opens one step of a checkpoint; sizes of all files are checked at once, checksums when a file is first
    read.

    Args:
        directory: a run folder (its ``latest`` step is taken, or the newest complete one when that is
            damaged, which a warning says) or one step folder (taken or refused).
        checksums: compare each file's SHA-256 before its first tensor is read; one rank per node is enough.

    Attributes:
        folder: the step folder that was opened.
        step: optimizer steps done when it was written.
        model: sizes of the model.
        aha: the attention variant, or None for a dense checkpoint.
        state: training state, or None when the checkpoint was not written by training.
        source_dir: tokenizer and configuration files that were carried along, or None.

    Raises:
        UserError: nothing complete is there; the message names the first damaged file and both sizes.
    """

    def __init__(self, directory: str | Path, checksums: bool = True) -> None:
        self.folder = find_step(Path(directory))
        index = _read_index(self.folder)
        self.step: int = index["step"]
        self.model = model_from_dict(index["model"])
        self.aha = aha_from_dict(index["aha"])
        self._tensors: dict[str, Any] = index["tensors"]
        self._files: dict[str, Any] = index["files"]
        self._checked = set() if checksums else set(self._files)
        self.state: dict[str, Any] | None = None
        if STATE_FILE in self._files:
            self._check(STATE_FILE)
            self.state = json.loads((self.folder / STATE_FILE).read_text(encoding="utf-8"))
        source = self.folder / SOURCE_FOLDER
        self.source_dir = source if source.is_dir() else None

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of all tensors that begin with `prefix`, sorted."""
        return [name for name in self._tensors if name.startswith(prefix)]

    def weight_names(self) -> list[str]:
        """Returns the names of the model's weights, sorted: no optimizer state, no random generators."""
        return [name for name in self._tensors if not name.startswith((OPTIMIZER_PREFIX, RNG_PREFIX))]

    def has(self, name: str) -> bool:
        """Returns whether the checkpoint holds the tensor."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the global shape of a tensor."""
        return tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Returns the type in which a tensor is stored."""
        return dtype_of(self._entry(name)["dtype"])

    def read(
        self,
        name: str,
        start: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Returns a block of a global tensor on the CPU, put together from the files that hold parts of it.

        Args:
            name: global name.
            start: first index of the block; None means the origin.
            shape: shape of the block; None means up to the end.
            dtype: type to convert to; None keeps the stored one.

        Raises:
            UserError: no such tensor, or a file is damaged.
        """
        entry = self._entry(name)
        whole = entry["shape"]
        first = list([0] * len(whole) if start is None else start)
        size = list([n - a for n, a in zip(whole, first, strict=True)] if shape is None else shape)
        if any(a < 0 or a + n > total for a, n, total in zip(first, size, whole, strict=True)):
            raise ValueError(f"{name} {whole}: block {size} at {first} lies outside it")
        stored = dtype_of(entry["dtype"])
        out = torch.empty(size, dtype=dtype or stored)
        for block in entry["slices"]:
            shared = overlap(first, size, block["start"], block["shape"])
            if shared is None:
                continue
            low, high = shared
            source = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, block["start"], strict=True))
            target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, first, strict=True))
            handle = self._open(block["file"])
            # safetensors cannot slice a tensor without dimensions
            part = handle.get_slice(block["key"])[source] if source else handle.get_tensor(block["key"])
            out[target] = part
        return out

    def verify(self) -> None:
        """Compares the checksum of every file. Raises UserError naming the first that differs."""
        for name in self._files:
            self._checked.discard(name)
            self._check(name)

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._tensors:
            raise UserError(f"checkpoint {self.folder} has no tensor '{name}'{nearest(name, self._tensors)}")
        return self._tensors[name]

    def _check(self, name: str) -> None:
        if name in self._checked:
            return
        expected, actual = self._files[name]["sha256"], sha256(self.folder / name)
        if actual != expected:
            raise UserError(
                f"{self.folder / name} is damaged: its SHA-256 is {actual}, written was {expected}; "
                "take an older step, or write the checkpoint again"
            )
        self._checked.add(name)

    def _open(self, name: str) -> Any:
        """Opens a file for one read: as long as it stays open, what was read of it counts as this process's memory."""
        self._check(name)
        try:
            return safe_open(self.folder / name, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{self.folder / name} is no safetensors file: {error}") from error


def complete_steps(directory: str | Path) -> list[int]:
    """Returns the steps in a run folder whose files are all there in full, oldest first; none without a folder."""
    return [step for step, folder in _steps(Path(directory)) if damage(folder) is None]


def keep_newest(directory: str | Path, count: int, every: int | None = None) -> None:
    """Removes all but the newest `count` complete steps of a run folder and those that `every` divides."""
    for step in complete_steps(directory)[:-count]:
        if every is None or step % every:
            remove_folder(Path(directory) / step_folder(step))


def damage(folder: Path) -> str | None:
    """Returns what is wrong with a step folder, naming the file and both sizes, or None if nothing is."""
    try:
        files = _read_index(folder)["files"]
    except UserError as error:
        return str(error)
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size != record["bytes"]:
            return f"{path} has {size} bytes instead of {record['bytes']}"
    return None


def find_step(directory: Path) -> Path:
    """Returns the step folder that a run folder, or a step folder, stands for; see CheckpointReader."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a checkpoint: no such folder")
    if step_of(directory.name) is not None or (directory / INDEX_FILE).exists():
        problem = damage(directory)
        if problem:
            raise UserError(f"checkpoint {directory} is incomplete: {problem}")
        return directory
    latest = directory / LATEST_FILE
    problem = f"{latest} is missing"
    if latest.is_file():
        wanted = directory / latest.read_text(encoding="utf-8").strip()
        problem = damage(wanted) if step_of(wanted.name) is not None else f"{latest} names no step"
        if problem is None:
            return wanted
    complete = complete_steps(directory)
    if not complete:
        steps = [folder.name for _, folder in _steps(directory)]
        hint = (
            ""
            if steps
            else "; a checkpoint folder holds step_... folders: import one with tools/convert_from_hf.py"
        )
        raise UserError(f"{directory} holds no complete checkpoint: {problem}{hint}")
    chosen = directory / step_folder(complete[-1])
    logger.warning("%s; taking the newest complete checkpoint instead: %s", problem, chosen)
    return chosen


def step_folders(directory: Path) -> list[Path]:
    """Returns the step folders of a run folder, complete or damaged, oldest first."""
    return [folder for _, folder in _steps(directory)]


def _steps(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    found = [(step_of(path.name), path) for path in directory.iterdir() if path.is_dir()]
    return sorted((step, path) for step, path in found if step is not None)


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX_FILE
    if not path.is_file():
        raise UserError(f"{path} is missing")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        written, version = index["format"], index["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({path.stat().st_size} bytes): {error}") from error
    if written != FORMAT or version > VERSION:
        raise UserError(
            f"{path} is format '{written}' version {version}; this version reads '{FORMAT}' up to {VERSION}"
        )
    return index
