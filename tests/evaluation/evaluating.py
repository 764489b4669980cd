"""Runs the command line of tools/evaluate.py in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_aha.evaluation.cli import main


def evaluate(folders: Path, *options: str, models: tuple[str, ...] = ("dense", "aha")) -> dict[str, Any]:
    """Returns what the tool writes as JSON.

    Args:
        folders: holds the models; the JSON file is written there.
        options: beside those of the models.
        models: names of their folders.
    """
    output = folders / "results.json"
    paths = [str(folders / name) for name in models]
    main(["--models", *paths, "--device", "cpu", "--json", str(output), *options])
    return json.loads(output.read_text())
