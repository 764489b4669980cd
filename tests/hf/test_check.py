"""The logits check at the end of both conversions can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_models import make_aha, make_llama
from safetensors.torch import load_file, save_file

from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.errors import UserError
from megatron_aha.hf.check import TOLERANCE, check_export, check_import, compare
from megatron_aha.hf.cli import convert_from_hf, convert_to_hf
from megatron_aha.hf.importer import import_checkpoint
from megatron_aha.hf.source import open_source


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize("routed", [True, False])
def test_a_wrong_weight_fails_the_check_of_an_import(tmp_path: Path, routed: bool) -> None:
    model = make_aha() if routed else make_llama()
    model.save_pretrained(tmp_path / "right")
    model.model.layers[1].self_attn.k_proj.weight.data[3, 5] += 0.01
    model.save_pretrained(tmp_path / "wrong")
    reader = CheckpointReader(
        import_checkpoint(tmp_path / "right", tmp_path / "ours", check=False, say=silent)
    )
    outcome = check_import(reader, open_source(tmp_path / "right"), None)
    assert outcome.passed and outcome.compared > outcome.tokens // 2
    with pytest.raises(UserError, match="the imported model and transformers' own differ: .*MORE THAN 1e-05"):
        check_import(reader, open_source(tmp_path / "wrong"), None)


def test_rounding_to_bf16_is_no_difference_but_forgetting_it_is(tmp_path: Path) -> None:
    make_llama().save_pretrained(tmp_path / "hf")
    step = import_checkpoint(
        tmp_path / "hf", tmp_path / "ours", dtype=torch.bfloat16, check=False, say=silent
    )
    assert check_import(CheckpointReader(step), open_source(tmp_path / "hf"), torch.bfloat16).passed
    with pytest.raises(UserError, match="MORE THAN"):
        check_import(CheckpointReader(step), open_source(tmp_path / "hf"), None)


def test_the_tools_convert_both_ways_and_an_export_that_does_not_load_or_agree_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_aha().save_pretrained(tmp_path / "hf")
    convert_from_hf(["--source", str(tmp_path / "hf"), "--output", str(tmp_path / "ours")])
    convert_to_hf(["--checkpoint", str(tmp_path / "ours"), "--output", str(tmp_path / "out")])
    assert capsys.readouterr().out.count("at most 1e-05") == 2
    reader = CheckpointReader(tmp_path / "ours")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    weights["model.layers.0.self_attn.router.bias"][1] += 1.0
    save_file(weights, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="exported model and the trainer's differ"):
        check_export(reader, tmp_path / "out", None)
    (tmp_path / "out" / "modeling_llama_aha.py").unlink()
    with pytest.raises(UserError, match="does not load in a fresh process: .*modeling_llama_aha.py"):
        check_export(reader, tmp_path / "out", None)


def test_a_router_logit_of_zero_within_rounding_is_not_a_difference_but_a_clear_one_is() -> None:
    ours = torch.randn(1, 10, 7)
    theirs = ours.clone()
    theirs[:, 6:] += 1.0
    routes = torch.ones(2, 1, 10, 4)
    near, flipped = routes.clone(), routes.clone()
    near[1, 0, 6, 2], flipped[1, 0, 6, 2] = 1e-6, -1e-6
    outcome = compare(ours, near, theirs, flipped)
    assert outcome.passed and outcome.compared == 6
    clear = routes.clone()
    clear[1, 0, 6, 2] = -1.0
    assert not compare(ours, routes, theirs, clear).passed
    assert not compare(ours, None, theirs, None).passed


def test_nothing_compared_and_nan_never_pass() -> None:
    ours = torch.randn(1, 10, 7)
    assert compare(ours, None, ours.clone(), None).passed
    assert not compare(ours, None, ours * float("nan"), None).passed
    near = torch.full((1, 1, 10, 1), 1e-6)
    assert not compare(ours, near, ours, -near).passed
    edge = ours + TOLERANCE * ours.abs().max() * 1.5
    assert not compare(ours, None, edge, None).passed
