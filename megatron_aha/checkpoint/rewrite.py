"""A checkpoint written anew: in files of another size, or as fp32 weights alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from megatron_aha.checkpoint.index import OPTIMIZER_PREFIX, FileRecord, Slice
from megatron_aha.checkpoint.reader import CheckpointReader
from megatron_aha.checkpoint.tensor_file import Deferred, in_files, outline_of
from megatron_aha.checkpoint.writer import CheckpointWriter
from megatron_aha.errors import UserError

MASTER_PREFIX = f"{OPTIMIZER_PREFIX}master."


def reshard(reader: CheckpointReader, target: str | Path, file_bytes: int) -> Path:
    """Writes every tensor and the training state again, in files of about ``file_bytes``; returns the step folder.

    A tensor larger than a file is cut along its first dimension. No more than one block is held in memory.

    Raises:
        UserError: a file of the source is damaged, or the target is the source or not writable.
    """
    return _write(reader, target, {name: name for name in reader.names()}, None, file_bytes, training=True)


def extract_fp32(reader: CheckpointReader, target: str | Path, file_bytes: int) -> Path:
    """Writes a checkpoint of the weights alone, as fp32, and returns its step folder.

    Where the optimizer kept an fp32 master of a weight, the master is taken: under bf16 it is the more exact.

    Raises:
        UserError: a file of the source is damaged, or the target is the source or not writable.
    """
    sources = {
        name: MASTER_PREFIX + name if reader.has(MASTER_PREFIX + name) else name
        for name in reader.weight_names()
    }
    return _write(reader, target, sources, torch.float32, file_bytes, training=False)


def _write(
    reader: CheckpointReader,
    target: str | Path,
    sources: dict[str, str],
    dtype: torch.dtype | None,
    file_bytes: int,
    *,
    training: bool,
) -> Path:
    """Writes tensors by target name from those of ``sources``, with the source's training state or without."""
    if Path(target).resolve() in (reader.folder.resolve(), reader.folder.resolve().parent):
        raise UserError(f"{target} is the checkpoint that is read; name another folder to write to")
    records: list[FileRecord] = []
    named = (
        (name, block)
        for name, source in sources.items()
        for block in _blocks(reader, source, dtype, file_bytes)
    )
    files = in_files(named, lambda item: outline_of(item[1].tensor).nbytes, file_bytes)
    with CheckpointWriter(target, reader.step, reader.model, reader.aha) as writer:
        for number, blocks in enumerate(files):
            records.append(writer.write_file(f"part-{number:05d}.safetensors", dict(blocks)))
        return writer.finish(records, reader.state if training else None, reader.source_dir)


def _blocks(
    reader: CheckpointReader, name: str, dtype: torch.dtype | None, file_bytes: int
) -> Iterator[Slice]:
    """Yields a tensor in blocks of whole rows, each no larger than a file where a row is not."""
    shape, kind = reader.shape(name), dtype or reader.dtype(name)
    row_bytes = math.prod(shape[1:]) * kind.itemsize
    rows = max(file_bytes // max(row_bytes, 1), 1)
    for first in range(0, max(shape[0], 1) if shape else 1, rows):
        start = (first, *(0 for _ in shape[1:])) if shape else ()
        block = (min(rows, shape[0] - first), *shape[1:]) if shape else ()
        outline = torch.empty(block, dtype=kind, device="meta")
        read = partial(reader.read, name, start, block, dtype)
        yield Slice(Deferred(outline, read), global_shape=shape, start=start)
