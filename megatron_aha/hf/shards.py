"""Safetensors files and their index as ``save_pretrained`` writes them, one weight at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megatron_aha.checkpoint.atomic import disk_errors
from megatron_aha.hf.source import WEIGHTS_FILE, WEIGHTS_INDEX


def write_shards(folder: Path, named: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Writes ``model.safetensors``, or numbered shards with an index when one file would be too large.

    Args:
        folder: where to write.
        named: names and values; never more than one shard of them is held.
        shard_bytes: size at which the next shard is begun.
    """
    parts: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}
    size = total = parameters = 0

    def flush() -> None:
        path = folder / f"part-{len(parts):05d}"
        with disk_errors(path):
            save_file(shard, path, metadata={"format": "pt"})
        parts.append((path, list(shard)))

    for name, value in named:
        if size and size + value.nbytes > shard_bytes:
            flush()
            shard, size = {}, 0
        shard[name] = value.contiguous()
        size += value.nbytes
        total += value.nbytes
        parameters += value.numel()
    flush()
    if len(parts) == 1:
        os.replace(parts[0][0], folder / WEIGHTS_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        os.replace(path, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {
        "metadata": {"total_size": total, "total_parameters": parameters},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
