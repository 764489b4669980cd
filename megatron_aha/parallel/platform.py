"""The machine under Megatron-core: this rank's GPU, or the CPU. Called before Megatron-core is imported."""

from __future__ import annotations

import os

import torch


def prepare_platform() -> None:
    """Selects this rank's GPU, or redirects Megatron-core to the CPU where no GPU exists."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return
    from megatron_aha.parallel import cpu_platform

    cpu_platform.install()
