"""Makes Megatron-core run on a machine without an accelerator; never imported where one exists.

Megatron-core asks ``torch.cuda`` for the device and the random state in places that no option reaches. Here those
few calls are answered by the CPU: the device is ``torch.device("cpu")``, the random state is the CPU generator's,
any factory call with ``device="cuda"`` lands on the CPU and ``tensor.cuda()`` stays there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_installed_mode: _CudaMeansCpu | None = None

# Numbers of glibc's mallopt(3), and the largest values it takes.
_M_TRIM_THRESHOLD, _LARGEST_TRIM_THRESHOLD = -1, 2**31 - 1
_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = -3, 32 * 2**20


class _CudaMeansCpu(TorchFunctionMode):
    """Makes ``device="cuda"`` mean the CPU, and ``tensor.cuda()`` mean the tensor, for every torch function."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _get_rng_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, device: Any = "cpu", graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _import_megatron_core() -> None:
    """Imports Megatron-core with ``torch.compile`` as a no-op.

    It compiles some forty small functions as soon as it is imported. That loads torch's compiler, which is half of
    the start-up, and on a CPU calls a C++ compiler, which need not be there.
    """
    compiled = torch.compile
    torch.compile = lambda model=None, **_: model or (lambda function: function)  # type: ignore[assignment]
    try:
        import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    finally:
        torch.compile = compiled


def _keep_freed_memory() -> None:
    """Lets malloc reuse the memory of freed tensors, where the C library can be told so.

    As glibc starts, every tensor above 128 KiB is mapped, zeroed page by page by the kernel and unmapped again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_TRIM_THRESHOLD)


def install() -> None:
    """Redirects Megatron-core's hard-coded CUDA calls to the CPU, once per process.

    Raises:
        RuntimeError: when CUDA is available; the redirection would hide the GPU.
    """
    global _installed_mode
    if _installed_mode is not None:
        return
    if torch.cuda.is_available():
        raise RuntimeError("the CPU platform must not be installed where CUDA is available")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _keep_freed_memory()
    _import_megatron_core()

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.get_rng_state = _get_rng_state
    torch.cuda.set_rng_state = _set_rng_state
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment]

    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = _get_rng_state
    megatron_random._set_cuda_rng_state = _set_rng_state

    _installed_mode = _CudaMeansCpu()
    _installed_mode.__enter__()
