"""Runs the Triton kernels in Triton's interpreter, on a CPU, against the definition."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aha_kernels import InputError, aha_attention

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("cases", ["interpreted_cases.py", "interpreted_counts.py"])
def test_triton_kernels_equal_the_definition_in_the_interpreter(cases: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"tests/kernels/{cases}",
    ]
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter accepts CPU tensors")
@pytest.mark.skipif(torch.cuda.is_available(), reason="triton can compute here")
def test_the_triton_backend_is_refused_where_it_cannot_run() -> None:
    q = torch.zeros(1, 4, 2, 64)
    with pytest.raises(
        InputError, match="backend='triton' cannot compute this call: .*; backend='torch' can"
    ):
        aha_attention(q, q, q, torch.ones(1, 4, 2), 2, backend="triton")
