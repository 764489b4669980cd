"""The Triton kernels compile for GPUs that are not there: no spills, shared memory within the chip, tensor
cores.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tools.compile_kernels import SHARED_MEMORY, shipped_kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

REPOSITORY = Path(__file__).parents[2]
REPORT = REPOSITORY / "docs" / "kernels-compile.md"
# On sm_90 without instructions of a warp group: 16 rows of decoding are too few for one, and tiles of 64
# keys with head_dim 256 spill.
WITHOUT_HGMMA = {("decode_split", 64), ("decode_split", 96), ("decode_split", 128), ("decode_split", 256)}
WITHOUT_HGMMA |= {("key_value", 256)}


def compile_all(architecture: str, head_dim: int) -> list[dict[str, Any]]:
    """Compiles all kernels in a process of their own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [str(REPOSITORY), str(REPOSITORY / "kernels"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    command = [sys.executable, "tools/compile_kernels.py", "--json", "--architectures", architecture]
    result = subprocess.run(
        [*command, "--head-dims", str(head_dim)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert result.stdout, result.stderr[-4000:]
    return list(json.loads(result.stdout.splitlines()[-1]))


def check(architecture: str, head_dim: int) -> None:
    """Asserts what the machine code must hold."""
    for kernel in compile_all(architecture, head_dim):
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= SHARED_MEMORY[architecture], kernel
        hopper = architecture == "sm_90" and (kernel["kernel"], head_dim) not in WITHOUT_HGMMA
        assert kernel["tensor"]["HGMMA"] if hopper else sum(kernel["tensor"].values()), kernel


def test_hopper_with_head_dim_128() -> None:
    check("sm_90", 128)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "head_dim"),
    [
        ("sm_80", 128),
        ("sm_90", 96),
        ("sm_100", 128),
        ("gfx942", 128),
        pytest.param("sm_80", 64, marks=pytest.mark.exhaustive),
        pytest.param("sm_90", 64, marks=pytest.mark.exhaustive),
        pytest.param("sm_90", 256, marks=pytest.mark.exhaustive),
    ],
)
def test_other_chips_and_head_dims(architecture: str, head_dim: int) -> None:
    check(architecture, head_dim)


def test_the_report_lists_the_tiles_that_are_shipped() -> None:
    import torch

    from aha_kernels.triton_tiles import kernel_tile

    names = {
        "near_forward": "near",
        "near_query": "query",
        "rows_query": "query",
        "key_value": "key_value",
        "decode_split": "decode",
    }
    rows = [line.split(" | ") for line in REPORT.read_text().splitlines() if line.startswith("| ")]
    seen = Counter[tuple[str, str]]()
    for kernel, options, architecture, head_dim, tile, *_ in rows[1:]:
        kernel = kernel.removeprefix("| ")
        name = names.get(kernel) or ("probe" if "PROBE=True" in options else "rows")
        shipped = kernel_tile(name, int(head_dim), torch.bfloat16, architecture)
        numbers = tuple(int(x) for x in re.findall(r"\d+", tile))
        assert numbers == (shipped.rows, shipped.keys, shipped.warps, shipped.stages), (kernel, head_dim)
        seen[architecture, head_dim] += 1
    assert set(seen) >= {(architecture, "128") for architecture in SHARED_MEMORY}
    assert set(seen.values()) == {len(shipped_kernels())}
