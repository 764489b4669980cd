"""What an import writes: which weights in which file, how each is made, and how much memory that takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_aha
from megatron_aha.checkpoint.format import CheckpointWriter, FileRecord
from megatron_aha.checkpoint.index import dtype_name
from megatron_aha.checkpoint.journal import state_of
from megatron_aha.checkpoint.tensor_file import Deferred, in_files
from megatron_aha.hf.mapping import Weight
from megatron_aha.hf.rules import Same
from megatron_aha.hf.source import Source


class ImportWork:
    """The weights of a source in files of a checkpoint; one weight is in memory at a time.

    Args:
        source: the model.
        plan: its weights, all of which the source holds.
        writer: of the checkpoint.
        dtype: of the written weights; None keeps each as it is.
        shard_bytes: size at which the next file is begun.

    Attributes:
        names: of the files.
        sizes: bytes of the weights of each file.
        parameters: numbers in all weights.
    """

    def __init__(
        self,
        source: Source,
        plan: Sequence[Weight],
        writer: CheckpointWriter,
        dtype: torch.dtype | None,
        shard_bytes: int,
    ) -> None:
        self._source = source
        self._writer = writer
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        outlines = {weight.ours: self._converted(weight, source.outline) for weight in plan}
        self._files = list(in_files(plan, lambda weight: outlines[weight.ours].nbytes, shard_bytes))
        self.names = [f"weights_{number:05d}.safetensors" for number in range(len(self._files))]
        self.parameters = sum(outline.numel() for outline in outlines.values())
        self.sizes = [sum(outlines[weight.ours].nbytes for weight in file) for file in self._files]

    def write(self, number: int, advance: Callable[[int], None]) -> FileRecord:
        """Writes one file and returns its record; calls ``advance`` with the bytes of each weight."""

        def read(weight: Weight) -> Tensor:
            whole = self._converted(weight, self._source.read)
            advance(whole.nbytes)
            return whole

        tensors = {
            weight.ours: Deferred(self._converted(weight, self._source.outline), partial(read, weight))
            for weight in self._files[number]
        }
        return self._writer.write_file(self.names[number], tensors)

    def made_from(self) -> dict[str, Any]:
        """Returns all that the bytes of the files depend on, as JSON data."""
        aha = self._source.aha
        return {
            "source files": [state_of(path) for path in self._source.files()],
            "configuration": [
                dataclasses.asdict(self._source.model),
                None if aha is None else dataclasses.asdict(aha),
            ],
            "--dtype": None if self._dtype is None else dtype_name(self._dtype),
            "--max-shard-gb": self._shard_bytes / 1e9,
            "version of megatron_aha": megatron_aha.__version__,
        }

    def peak_bytes(self) -> int:
        """Returns about how many bytes of tensors a process holds at most: one weight, its parts or its copy."""
        return max(self._peak_bytes(weight) for file in self._files for weight in file)

    def _peak_bytes(self, weight: Weight) -> int:
        parts = [self._source.outline(name) for name in weight.theirs]
        read = sum(part.nbytes for part in parts)
        merged = 0 if isinstance(weight.rule, Same) else read
        converted = self._converted(weight, self._source.outline)
        copied = 0 if converted.dtype == parts[0].dtype else converted.nbytes
        return read + max(merged, copied)

    def _converted(self, weight: Weight, part: Callable[[str], Tensor]) -> Tensor:
        whole = weight.rule.merge([part(name) for name in weight.theirs], self._source.model)
        return whole.to(self._dtype or whole.dtype)
