"""One safetensors file, written tensor by tensor.

The library's own writer wants all tensors of a file in memory; this one holds a single tensor, and can pass the bytes
on to a checksum while they are written. Files are read with the library. The format is that of
https://huggingface.co/docs/safetensors: the header's length, a JSON header, the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

# Element types by the names that the format gives them.
TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Item = TypeVar("Item")
_CHUNK = 2**23  # bytes that are written and passed on at a time


@dataclass(frozen=True)
class Deferred:
    """A tensor that is read when its turn to be written comes.

    Args:
        outline: a tensor of the same shape and type, on the meta device.
        read: returns the tensor.
    """

    outline: Tensor
    read: Callable[[], Tensor]


def outline_of(tensor: Tensor | Deferred) -> Tensor:
    """Returns a tensor of the same shape and type."""
    return tensor.outline if isinstance(tensor, Deferred) else tensor


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor | Deferred],
    seen: Callable[[memoryview], Any] | None = None,
    *,
    durable: bool = False,
) -> None:
    """Writes a safetensors file; holds no more than one deferred tensor, and one that is not on the CPU, at a time.

    Args:
        path: of the file; one that exists is replaced.
        tensors: by name.
        seen: gets every byte of the file in order, from another thread, while it is written; a checksum's ``update``.
        durable: return when the bytes have reached the disk, which takes them while the next ones are written.

    Raises:
        OSError: the file cannot be written.
        ValueError: the format has no such type, or a deferred tensor is not what its outline said.
    """
    # Readers map the file: each tensor must begin at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: -outline_of(item[1]).dtype.itemsize)
    with path.open("wb") as stream, ThreadPoolExecutor(2) as beside:
        sync = partial(os.fsync, stream.fileno())
        syncing: Future[None] | None = None

        def put(data: memoryview) -> None:
            nonlocal syncing
            for first in range(0, len(data), _CHUNK):
                chunk = data[first : first + _CHUNK]
                watched = beside.submit(seen, chunk) if seen is not None else None
                stream.write(chunk)
                if watched is not None:
                    watched.result()
                if durable and (syncing is None or syncing.done()):
                    if syncing is not None:
                        syncing.result()
                    syncing = beside.submit(sync)

        put(memoryview(_header({name: outline_of(tensor) for name, tensor in ordered})))
        for name, tensor in ordered:
            put(_bytes_of(name, tensor))
        if syncing is not None:
            syncing.result()
        if durable:
            stream.flush()
            sync()


def in_files(items: Iterable[Item], bytes_of: Callable[[Item], int], file_bytes: int) -> Iterator[list[Item]]:
    """Yields items file by file, in their order; a file is larger than ``file_bytes`` only if one item is."""
    pending: list[Item] = []
    size = 0
    for item in items:
        item_bytes = bytes_of(item)
        if size and size + item_bytes > file_bytes:
            yield pending
            pending, size = [], 0
        pending.append(item)
        size += item_bytes
    if pending:
        yield pending


def _header(outlines: Mapping[str, Tensor]) -> bytes:
    """Returns the header and its length, padded so that the tensors begin at a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, outline in outlines.items():
        if outline.dtype not in TYPE_NAMES:
            raise ValueError(f"{name} has the type {outline.dtype}, which a safetensors file cannot hold")
        begin, end = end, end + math.prod(outline.shape) * outline.dtype.itemsize
        entries[name] = {
            "dtype": TYPE_NAMES[outline.dtype],
            "shape": list(outline.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(name: str, tensor: Tensor | Deferred) -> memoryview:
    value = tensor.read() if isinstance(tensor, Deferred) else tensor
    outline = outline_of(tensor)
    if (value.shape, value.dtype) != (outline.shape, outline.dtype):
        raise ValueError(
            f"{name} is {list(value.shape)} {value.dtype}, announced was {list(outline.shape)} {outline.dtype}"
        )
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
