"""What every test runs under: no network, no user caches, one thread, GPU tests skipped without a GPU."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Before anything imports torch, deepspeed or transformers: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="megatron_aha-hf-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` where torch sees no GPU, and ``exhaustive`` ones unless asked for, saying so."""
    if "MEGATRON_AHA_EXHAUSTIVE" not in os.environ:
        for item in items:
            if item.get_closest_marker("exhaustive"):
                item.add_marker(pytest.mark.skip(reason="takes long: set MEGATRON_AHA_EXHAUSTIVE=1"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _no_groups_left_behind() -> Iterator[None]:
    """Collects the models that a test has built in this process, and with them their process groups.

    A model is cyclic garbage that holds its groups; each holds three threads of gloo, which wake a hundred times a
    second for as long as nobody collects it: after a few hundred tests they would take a core.
    """
    yield
    threads = "/proc/self/task"
    if os.path.isdir(threads) and len(os.listdir(threads)) > 32:
        gc.collect()
