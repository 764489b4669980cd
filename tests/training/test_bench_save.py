"""The benchmark of saving runs and counts what a checkpoint holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_short_run(tmp_path: Path) -> None:
    output = tmp_path / "seconds.json"
    command = [
        sys.executable,
        "tools/bench_save.py",
        "--model",
        "configs/model/tiny.yaml",
        "--json",
        str(output),
    ]
    command += ["--saves", "1", "--steps", "1", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert found["bytes"] % 12 == 0 and found["bytes"] > 10_000  # weight and two moments, fp32
    assert min(found["torch_save"], found["save"], found["held_up"]) > 0
    assert f"{found['bytes'] / 1e9:.2f} GB" in done.stdout
    assert [path for path in tmp_path.iterdir() if path != output] == []
