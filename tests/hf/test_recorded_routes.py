"""Routes recorded from an exported model are what tools/count_tiles.py counts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_models import SIZES, WINDOW, make_aha, random_tokens
from safetensors.torch import load_file, save_file

from aha_kernels import tile_counts
from aha_kernels.problem import Problem
from aha_kernels.reference import visible_keys
from aha_kernels.tile_counts import TileCount, count_tiles
from aha_kernels.triton_tiles import Tile

TOOL = Path(__file__).parents[2] / "tools" / "count_tiles.py"
LENGTH = 160


def record(folder: Path, **options: object) -> tuple[Path, torch.Tensor]:
    """Returns a file with the routes of one sequence, and each layer's usage as the model tells it."""
    model = make_aha(**options)
    with torch.no_grad():
        output = model(random_tokens(1, LENGTH), output_router_stats=True)
    save_file({"routes": torch.cat(output.routes)}, folder / "recorded.safetensors")
    return folder / "recorded.safetensors", output.router_usage.mean(-1)


def count(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--routes", str(path), "--window", str(WINDOW), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("granularity", ["head", "kv_group"])
def test_the_tool_counts_each_recorded_layer(granularity: str, tmp_path: Path) -> None:
    path, usage = record(tmp_path, aha_granularity=granularity)
    result = count(path, "--heads", "4", "--kv-heads", "2", "--head-dim", "64")
    assert result.returncode == 0, result.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        [f"recorded.safetensors, layer {layer}", str(LENGTH)] for layer in range(SIZES["num_hidden_layers"])
    ]
    assert [float(row[2]) for row in rows] == pytest.approx(usage.tolist(), abs=6e-4)
    assert all(float(ratio) >= 1.0 for row in rows for ratio in row[3:])


def test_tiles_of_a_model_s_routes_hold_every_score_that_the_routes_open(tmp_path: Path) -> None:
    path, _ = record(tmp_path)
    everything, here = visible_keys(1, LENGTH, LENGTH, WINDOW)
    for layer in load_file(path)["routes"]:
        opened = torch.where(layer[None, ..., None], everything[:, :, None], here[:, :, None])
        for name, counts in count_tiles(layer[None], LENGTH, 2, 64, Problem(WINDOW, 1.0)).items():
            assert counts.needed == int(opened.sum()), name
            assert counts.computed >= counts.needed, name


def test_tiles_of_one_open_token_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_counts, "kernel_tile", lambda *_: Tile(64, 32, 4, 1))
    route = torch.zeros(1, 256, 1)
    route[0, 200] = 1.0
    counts = count_tiles(route, 256, 1, 64, Problem(64, 1.0))
    # The first 64 rows see 1 to 64 keys, the others 64, and the open one 201.
    needed = 64 * 65 // 2 + 192 * 64 + (201 - 64)
    # Blocks of 64 rows see keys 0 to 63, 1 to 127, 65 to 191 and 129 to 255, in tiles of 32; the open row 0 to 200.
    near, listed = 2 + 4 + 4 + 4, 7
    computed = (near + listed) * 64 * 32
    assert counts["forward"] == counts["query"] == TileCount(near, listed, computed, needed)
    # Keys 32 i to 32 i + 31 are seen by rows 32 i to 32 i + 94, two blocks of 64, the last two by 64 and 32 rows;
    # the open row sees keys of seven of the eight blocks.
    near, listed = 6 * 2 + 1 + 1, 7
    assert counts["key_value"] == TileCount(near, listed, (near + listed) * 64 * 32, needed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-heads", "3"], "has 4 heads, no multiple of --kv-heads 3"),
        (["--heads", "6", "--kv-heads", "2"], "4 routers a layer, which do not divide --heads 6"),
    ],
)
def test_heads_that_do_not_fit_are_refused(arguments: list[str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "recorded.safetensors"
    save_file({"routes": torch.zeros(2, 8, 4)}, path)
    result = count(path, *arguments)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert re.search(words, result.stderr)
