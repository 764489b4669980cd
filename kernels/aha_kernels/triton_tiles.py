"""Tile shapes of the Triton kernels: a small table instead of a search at start-up.

The entries are the ones that compile without spills (kernels with dots in bf16, checked without a GPU by
the compile tests); they have not been timed on a GPU yet.
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


def forward_tile(head_dim: int, dtype: torch.dtype, capability: int) -> Tile:
    """Returns the tile of the two forward kernels; capability is 80, 90, 100 ..."""
    if dtype == torch.float32:
        return Tile(64, 32, 4, 1)
    if head_dim > 128:
        return Tile(64, 32, 8, 2) if capability >= 90 else Tile(32, 32, 8, 2)
    if capability >= 90:
        return Tile(128, 64, 8, 2)
    return Tile(64, 64, 8, 2)


def probe_tile(head_dim: int, dtype: torch.dtype, capability: int) -> Tile:
    """Returns the tile of the forward kernel when it probes here-rows, which takes a few registers more."""
    tile = forward_tile(head_dim, dtype, capability)
    return Tile(64, 32, 8, 2) if capability < 90 and tile.keys == 64 else tile


def query_tile(head_dim: int, dtype: torch.dtype, capability: int) -> Tile:
    """Returns the tile of the backward kernels for queries."""
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1)
    if head_dim > 128:
        return Tile(32, 32, 8, 1)
    if capability >= 90:
        return Tile(64, 64, 8, 2)
    return Tile(64, 32, 8, 2)


def key_value_tile(head_dim: int, dtype: torch.dtype, capability: int) -> Tile:
    """Returns the tile of the backward kernel for keys and values."""
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1)
    if head_dim > 128:
        return Tile(32, 32, 8, 1)
    return Tile(64, 64, 8, 2) if capability >= 90 else Tile(64, 32, 8, 1)


def decode_tile(head_dim: int, dtype: torch.dtype, capability: int) -> Tile:
    """Returns the tile of the decode kernel; its rows are a KV group's heads times the new tokens, at least
    16.
    """
    return Tile(16, 64 if head_dim <= 128 and dtype != torch.float32 else 32, 4, 2)
