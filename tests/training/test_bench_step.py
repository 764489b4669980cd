"""The benchmark of a training step runs, sets the usage that it was asked for, and takes the step apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_short_run(tmp_path: Path) -> None:
    usage = 0.3
    output = tmp_path / "ratios.json"
    command = [
        sys.executable,
        "tools/bench_step.py",
        "--model",
        "configs/model/tiny.yaml",
        "--json",
        str(output),
    ]
    command += ["--length", "512", "--window", "16", "--usage", str(usage), "--steps", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    ratios = json.loads(output.read_text())
    assert ratios["usage"] == pytest.approx(usage, abs=0.1)
    assert f"usage {ratios['usage']:.3f}" in done.stdout
    assert min(ratios["step"], ratios["core"], ratios["rest"]) > 0
    assert 0 < ratios["core_share_dense"] < 1
