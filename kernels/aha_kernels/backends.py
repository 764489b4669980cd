"""Which implementation computes a call."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from aha_kernels.errors import InputError

BACKENDS = ("auto", "torch", "triton")
TRITON_HEAD_DIMS = (64, 96, 128, 256)


@cache
def triton_installed() -> bool:
    """Returns whether triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None


def choose_backend(backend: str, device: torch.device) -> str:
    """Returns "torch" or "triton" for the asked backend, or raises InputError when it cannot run on the
    device.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}, but must be one of {', '.join(BACKENDS)}")
    return "torch" if backend == "auto" else backend
