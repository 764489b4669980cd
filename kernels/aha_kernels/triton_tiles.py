"""Tile shapes of the Triton kernels: a small table instead of a search at start-up.

They are chosen to compile without spills into the shared memory of their chips, which tests check without a
GPU; docs/kernels-compile.md tells what has been seen. They have not been timed on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """Rows and keys of a tile, warps and pipeline stages of a program."""

    rows: int
    keys: int
    warps: int
    stages: int


# Of each kernel: the tiles for head_dim up to 128 and for 256, in 16-bit types.
TILES: dict[str, dict[str, tuple[Tile, Tile]]] = {
    "sm_80": {
        "near": (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
        "rows": (Tile(64, 64, 8, 2), Tile(32, 32, 8, 2)),
        "probe": (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
        "query": (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
        "key_value": (Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),
        "decode": (Tile(16, 64, 4, 2), Tile(16, 32, 4, 2)),
    },
    "sm_90": {
        "near": (Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
        "rows": (Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
        "probe": (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2)),
        "query": (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
        "key_value": (Tile(32, 128, 8, 2), Tile(32, 32, 8, 1)),
        "decode": (Tile(16, 64, 4, 2), Tile(16, 32, 4, 2)),
    },
}
TILES["sm_100"] = TILES["sm_90"] | {"decode": (Tile(16, 64, 8, 2), Tile(16, 32, 4, 2))}
TILES["gfx942"] = TILES["sm_80"] | {  # with 4 warps a thread has 512 registers, with 8 half of them
    "probe": (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    "query": (Tile(64, 32, 8, 2), Tile(32, 32, 4, 1)),
    "key_value": (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
SINGLE = {  # in fp32, on every chip
    **dict.fromkeys(("near", "rows", "probe"), Tile(64, 32, 4, 1)),
    **dict.fromkeys(("query", "key_value"), Tile(32, 32, 4, 1)),
    "decode": Tile(16, 32, 4, 2),
}


def architecture(device: torch.device) -> str:
    """Returns the column of the table for a device; chips without one take the modest tiles of sm_80."""
    if device.type != "cuda":  # the interpreter
        return "sm_90"
    if torch.version.hip is not None:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def kernel_tile(kernel: str, head_dim: int, dtype: torch.dtype, architecture: str) -> Tile:
    """Returns the tile of a kernel: near and rows (the two forward passes), probe (the rows pass for router
    gradients), query or key_value (backward), decode (its rows are a KV group's heads times the new tokens,
    at least 16).
    """
    if dtype == torch.float32:
        return SINGLE[kernel]
    return TILES[architecture][kernel][head_dim > 128]
