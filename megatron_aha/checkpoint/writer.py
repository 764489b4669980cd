"""Writing a checkpoint: many ranks write files, one rank makes them a checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron_aha.checkpoint.atomic import (
    disk_errors,
    keep_only,
    remove_rests,
    replace_folder,
    sha256,
    sync,
    write_text,
)
from megatron_aha.checkpoint.index import (
    FORMAT,
    INDEX_FILE,
    LATEST_FILE,
    SOURCE_FOLDER,
    STATE_FILE,
    VERSION,
    FileRecord,
    Slice,
    dtype_name,
    merge_records,
    step_folder,
)
from megatron_aha.checkpoint.tensor_file import Deferred, outline_of, write_tensors
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig


class CheckpointWriter:
    """Writes one step. Every rank opens it and writes its files, their records are gathered, one rank
    finishes.

    Until ``finish`` has renamed it, the step lives in a hidden temporary folder that no reader looks at.
    For one process alone, leaving a ``with`` block by an exception removes that folder; several ranks share it and
    call ``open`` and, once all have stopped writing, ``discard``. Nothing here communicates: the caller
    needs a barrier between the last ``write_file`` of any rank and ``finish``, which gathering the records
    already is.

    Args:
        directory: run folder, one subfolder per step; created when missing.
        step: optimizer steps done.
        model: sizes of the model.
        aha: the attention variant, or None for a dense checkpoint.
    """

    def __init__(self, directory: str | Path, step: int, model: ModelConfig, aha: AHAConfig | None) -> None:
        self.directory = Path(directory)
        self.step = step
        self.model = model
        self.aha = aha
        self.final = self.directory / step_folder(step)
        self.temporary = self.directory / f".tmp-{self.final.name}"

    def __enter__(self) -> CheckpointWriter:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()

    def open(self) -> None:
        """Makes the temporary folder. Raises UserError when the disk is full or not writable."""
        with disk_errors(self.temporary):
            self.temporary.mkdir(parents=True, exist_ok=True)

    def discard(self) -> None:
        """Removes the temporary folder; only when no rank writes to it any more."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def write_file(
        self, file_name: str, tensors: Mapping[str, Slice | Deferred | torch.Tensor | Sequence[Slice]]
    ) -> FileRecord:
        """Writes one safetensors file; a plain or deferred tensor stands for a whole global tensor.

        Args:
            file_name: ends in ``.safetensors``; no other rank may use it.
            tensors: by global name, a whole tensor, a block of it, or several blocks of it.

        Returns:
            The file's record for ``finish``; it is plain JSON data.

        Raises:
            UserError: the disk is full or not writable.
        """
        path = self.temporary / file_name
        blocks, values = [], {}
        for name, key, block in _keyed(tensors):
            values[key] = block.tensor
            outline = outline_of(block.tensor)
            shape = list(outline.shape)
            blocks.append(
                {
                    "name": name,
                    "key": key,
                    "dtype": dtype_name(outline.dtype),
                    "global_shape": list(shape if block.global_shape is None else block.global_shape),
                    "start": list([0] * len(shape) if block.start is None else block.start),
                    "shape": shape,
                }
            )
        digest = hashlib.sha256()
        with disk_errors(path):
            write_tensors(path, values, digest.update, durable=True)
        return {
            "file": file_name,
            "bytes": path.stat().st_size,
            "sha256": digest.hexdigest(),
            "tensors": blocks,
        }

    def finish(
        self,
        records: Sequence[FileRecord],
        state: dict[str, Any] | None = None,
        source_dir: str | Path | None = None,
    ) -> Path:
        """On one rank, after all files are written: checks, writes the index, renames, and moves ``latest``
        last.

        Args:
            records: the records of all files of all ranks.
            state: JSON-able training state, or None.
            source_dir: folder of tokenizer and configuration files to carry along, or None.

        Returns:
            The finished step folder.

        Raises:
            ValueError: the blocks of some tensor overlap or do not cover it.
            UserError: the disk is full or not writable.
        """
        tensors, files = merge_records(records)
        for name, record in files.items():
            actual = (self.temporary / name).stat().st_size
            if actual != record["bytes"]:
                raise ValueError(f"{name} has {actual} bytes on disk, {record['bytes']} were written")
        self._remove_strangers(set(files))
        if state is not None:
            write_text(self.temporary / STATE_FILE, json.dumps(state, indent=1, sort_keys=True))
        if source_dir is not None:
            with disk_errors(self.temporary / SOURCE_FOLDER):
                shutil.copytree(source_dir, self.temporary / SOURCE_FOLDER)
        for path in sorted(self.temporary.rglob("*")):
            name = path.relative_to(self.temporary).as_posix()
            if path.is_file() and name not in files:
                sync(path)
                files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        index = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "model": dataclasses.asdict(self.model),
            "aha": None if self.aha is None else dataclasses.asdict(self.aha),
            "tensors": tensors,
            "files": files,
        }
        write_text(self.temporary / INDEX_FILE, json.dumps(index, indent=1))
        with disk_errors(self.final):
            replace_folder(self.temporary, self.final)
        write_text(self.directory / LATEST_FILE, self.final.name + "\n")
        remove_rests(self.directory)
        return self.final

    def _remove_strangers(self, files: set[str]) -> None:
        """Removes what killed saves left: other temporary folders, and files in this one without a record."""
        for path in self.directory.glob(".tmp-step_*"):
            if path != self.temporary:
                shutil.rmtree(path, ignore_errors=True)
        keep_only(self.temporary, files)


def _keyed(
    tensors: Mapping[str, Slice | Deferred | torch.Tensor | Sequence[Slice]],
) -> Iterator[tuple[str, str, Slice]]:
    """Yields each block with its tensor's name and its key within the file."""
    for name, item in tensors.items():
        if isinstance(item, torch.Tensor | Deferred):
            yield name, name, Slice(item)
        elif isinstance(item, Slice):
            yield name, name, item
        else:
            for number, block in enumerate(item):
                yield name, f"{name}#{number}", block
