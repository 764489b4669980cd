"""Which weights an export writes to which safetensors file, named and indexed as ``save_pretrained`` does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megatron_aha
from megatron_aha.checkpoint.atomic import disk_errors, sha256
from megatron_aha.checkpoint.format import CheckpointReader, FileRecord
from megatron_aha.checkpoint.index import INDEX_FILE, dtype_name
from megatron_aha.checkpoint.tensor_file import Deferred, in_files, write_tensors
from megatron_aha.hf.faolmo import fused
from megatron_aha.hf.mapping import Weight
from megatron_aha.hf.source import WEIGHTS_FILE


class ExportWork:
    """The weights of a checkpoint under their names, in files; one weight is in memory at a time.

    Args:
        reader: the checkpoint.
        plan: its weights.
        folder: of the files.
        dtype: of the written weights; None keeps each as it is.
        shard_bytes: size at which the next file is begun.
        authors_format: write the format of ``megatron_aha.hf.faolmo``.

    Attributes:
        names: of the files.
        sizes: bytes of the weights of each file.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        plan: Sequence[Weight],
        folder: Path,
        dtype: torch.dtype | None,
        shard_bytes: int,
        authors_format: bool,
    ) -> None:
        self._reader = reader
        self._plan = plan
        self._folder = folder
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        self._authors_format = authors_format
        files = self._files(lambda _: None)
        count = len(files)
        self.names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if count == 1:
            self.names = [WEIGHTS_FILE]
        self.sizes = [sum(weight.outline.nbytes for weight in file.values()) for file in files]

    def write(self, number: int, advance: Callable[[int], None]) -> FileRecord:
        """Writes one file and returns its record; calls ``advance`` with the bytes of each weight."""
        path = self._folder / self.names[number]
        digest = hashlib.sha256()
        with disk_errors(path):
            write_tensors(path, self._files(advance)[number], digest.update)
        return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}

    def index(self) -> dict[str, Any]:
        """Returns the content of ``model.safetensors.index.json``."""
        files = self._files(lambda _: None)
        outlines = [weight.outline for file in files for weight in file.values()]
        weight_map = {name: file for file, held in zip(self.names, files, strict=True) for name in held}
        return {
            "metadata": {
                "total_size": sum(outline.nbytes for outline in outlines),
                "total_parameters": sum(outline.numel() for outline in outlines),
            },
            "weight_map": dict(sorted(weight_map.items())),
        }

    def made_from(self) -> dict[str, Any]:
        """Returns all that the bytes of the files depend on, as JSON data."""
        return {
            # it holds the checksums of all files
            "checkpoint": sha256(self._reader.folder / INDEX_FILE),
            "--dtype": None if self._dtype is None else dtype_name(self._dtype),
            "--max-shard-gb": self._shard_bytes / 1e9,
            "--format": "faolmo" if self._authors_format else "aha",
            "version of megatron_aha": megatron_aha.__version__,
        }

    def _files(self, advance: Callable[[int], None]) -> list[dict[str, Deferred]]:
        """Returns the weights of each file by name; ``advance`` is called when they are read."""
        named = self._named(advance)
        ordered = fused(named) if self._authors_format else named
        return [
            dict(file) for file in in_files(ordered, lambda item: item[1].outline.nbytes, self._shard_bytes)
        ]

    def _named(self, advance: Callable[[int], None]) -> Iterator[tuple[str, Deferred]]:
        last: tuple[str, list[Tensor]] = ("", [])

        def read(weight: Weight, number: int) -> Tensor:
            nonlocal last
            if last[0] != weight.ours:  # parts of one weight are written one after another
                last = ("", [])
                whole = self._reader.read(weight.ours, dtype=self._dtype)
                last = (weight.ours, weight.rule.split(whole, self._reader.model))
            advance(last[1][number].nbytes)
            return last[1][number]

        for weight in self._plan:
            stored = self._dtype or self._reader.dtype(weight.ours)
            whole = torch.empty(self._reader.shape(weight.ours), dtype=stored, device="meta")
            outlines = weight.rule.split(whole, self._reader.model)
            for number, (name, outline) in enumerate(zip(weight.theirs, outlines, strict=True)):
                yield name, Deferred(outline, partial(read, weight, number))
