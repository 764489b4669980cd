"""Safetensors files and their index as ``save_pretrained`` writes them, one weight at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from megatron_aha.checkpoint.atomic import disk_errors
from megatron_aha.checkpoint.tensor_file import Deferred, in_shards, outline_of, write_tensors
from megatron_aha.hf.source import WEIGHTS_FILE, WEIGHTS_INDEX


def write_shards(folder: Path, named: Iterable[tuple[str, Deferred]], shard_bytes: int) -> None:
    """Writes ``model.safetensors``, or numbered shards with an index when one file would be too large.

    Args:
        folder: where to write.
        named: names and weights, each read when it is written.
        shard_bytes: size at which the next shard is begun.
    """
    shards = list(in_shards(named, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        numbered = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = WEIGHTS_FILE if len(shards) == 1 else numbered
        with disk_errors(folder / file):
            write_tensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) == 1:
        return
    outlines = [outline_of(tensor) for shard in shards for tensor in shard.values()]
    index = {
        "metadata": {
            "total_size": sum(outline.nbytes for outline in outlines),
            "total_parameters": sum(outline.numel() for outline in outlines),
        },
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
