"""The Triton kernels compile for GPUs that are not there: no spills, shared memory within the chip, tensor
cores.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes a program may use
REPOSITORY = Path(__file__).parents[2]


def check(capability: int, head_dim: int) -> None:
    """Compiles all kernels in a process of their own and asserts what the machine code must hold."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_kernels", str(capability), str(head_dim)]
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels"), environment.get("PYTHONPATH", "")])
    environment["PYTHONPATH"] = path
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=290
    )
    assert result.returncode == 0, result.stderr[-4000:]
    for kernel in json.loads(result.stdout.splitlines()[-1]):
        assert kernel["spills"] == 0, kernel
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        decoding = kernel["kernel"] == "decode_split_kernel"  # 16 rows: too few for a warp group
        assert (
            kernel["wgmma"] if capability == 90 and not decoding else kernel["mma"] + kernel["wgmma"]
        ) > 0, kernel


def test_hopper_with_head_dim_128() -> None:
    check(90, 128)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "head_dim"), [(90, 64), (80, 64), (80, 128)])
def test_other_chips_and_head_dims(capability: int, head_dim: int) -> None:
    check(capability, head_dim)
