"""The benchmark of prompts and decoding runs, and its routed model is the dense one with the usage asked for."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hf_models import WINDOW, make_llama, random_tokens

from megatron_aha.hf.source import open_source

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_decode.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_decode", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_llama().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_a_short_run(tool: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder.parent / "rows.json"
    options = ["--contexts", "32", "64", "--window", str(WINDOW), "--tokens", "2", "--json", str(output)]
    tool.main(["--source", str(folder), *options])
    rows = json.loads(output.read_text())
    assert [row["context"] for row in rows] == [32, 64]
    printed = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    for row, cells in zip(rows, printed, strict=True):
        names = [
            f"{name}_{column}" for name in ("prefill", "decode") for column in ("dense", "routed", "ratio")
        ]
        assert all(row[name] > 0 for name in names)
        # of one prompt the ratio is that of both speeds
        assert row["prefill_ratio"] == pytest.approx(row["prefill_routed"] / row["prefill_dense"])
        assert [float(cell) for cell in cells[1:]] == pytest.approx([row[name] for name in names], abs=0.051)


@torch.no_grad()
def test_the_routed_model_is_the_dense_one_with_this_usage(tool: ModuleType, folder: Path) -> None:
    source = open_source(folder)
    dense = source.reference()
    tokens = random_tokens(1, 200)
    whole = tool.with_routers(source, dense, WINDOW, 1.0)
    wanted = dense(tokens).logits
    assert (whole(tokens).logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    routed = tool.with_routers(source, dense, WINDOW, 0.07)
    output = routed(tokens, output_router_stats=True)
    assert float(output.router_usage.mean()) == pytest.approx(0.07, abs=0.025)  # 1,600 draws: four deviations
    assert (output.logits - wanted).abs().max() > 1e-2 * wanted.abs().max()
