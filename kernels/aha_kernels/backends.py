"""Which implementation computes a call."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from aha_kernels.errors import InputError

BACKENDS = ("auto", "torch", "triton")
TRITON_HEAD_DIMS = (64, 96, 128, 256)


@cache
def triton_installed() -> bool:
    """Returns whether triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Returns whether Triton runs kernels in its interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns why Triton kernels cannot compute a call, or None when they can."""
    if not triton_installed():
        return "triton is not installed"
    if device.type != "cuda" and not interpreting():
        return f"the tensors are on {device}, not on a GPU"
    if dtype == torch.float64:
        return "the dtype is float64"
    if head_dim not in TRITON_HEAD_DIMS:
        return f"head_dim is {head_dim}, not one of {', '.join(map(str, TRITON_HEAD_DIMS))}"
    return None


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Returns "torch" or "triton" for the asked backend, or raises InputError when it cannot compute the
    call.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}, but must be one of {', '.join(BACKENDS)}")
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return "torch"
    obstacle = triton_obstacle(device, dtype, head_dim)
    if backend == "triton" and obstacle is not None:
        raise InputError(f"backend='triton' cannot compute this call: {obstacle}; backend='torch' can")
    return "torch" if obstacle else "triton"
