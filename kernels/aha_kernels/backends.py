"""Which implementation computes a call."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from aha_kernels.errors import InputError

BACKENDS = ("auto", "reference", "torch", "triton", "flash")
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


def flash_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why flash-attn cannot compute a call, or None when it can."""
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if device.type != "cuda":
        return f"the tensors are on {device}, not on a GPU"
    return None if dtype in (torch.bfloat16, torch.float16) else f"the dtype is {dtype}"


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Returns the name of the backend to use for the asked one; only "auto" changes.

    Raises InputError when the asked one is unknown or cannot compute the call.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}, but must be one of {', '.join(BACKENDS)}")
    if backend == "auto":
        usable = device.type == "cuda" and triton_obstacle(device, dtype, head_dim) is None
        return "triton" if usable else "torch"
    obstacle = None
    if backend == "triton":
        obstacle = triton_obstacle(device, dtype, head_dim)
    elif backend == "flash":
        obstacle = flash_obstacle(device, dtype)
    if obstacle is not None:
        raise InputError(f"backend={backend!r} cannot compute this call: {obstacle}; backend='torch' can")
    return backend
