"""The model card of an export: only what is known, and the licence of the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hf_models import make_aha, make_family, make_llama, save_tokenizer

from megatron_aha.checkpoint.format import CheckpointReader, CheckpointWriter
from megatron_aha.hf.card import front_matter
from megatron_aha.hf.cli import convert_to_hf
from megatron_aha.hf.exporter import export_checkpoint
from megatron_aha.hf.importer import import_checkpoint

STATE = {
    "consumed_samples": 40,
    "usage": [[0.5, 0.25, 0.0, 0.25], [1.0, 1.0, 1.0, 0.0]],
    "run": {"seq_length": 128, "training": {"lr": 0.0003, "schedule": "wsd", "global_batch_size": 4}},
}


def silent(_: str) -> None:
    pass


def imported(model: Any, work: Path, name: str = "Base-1B") -> Path:
    model.save_pretrained(work / name)
    save_tokenizer(work / name)
    return import_checkpoint(work / name, work / "ours", check=False, say=silent)


def trained(step: Path, folder: Path, state: dict[str, Any] | None) -> Path:
    """Writes the checkpoint again as training would, with a state."""
    reader = CheckpointReader(step)
    with CheckpointWriter(folder, 10, reader.model, reader.aha) as writer:
        record = writer.write_file("a.safetensors", {name: reader.read(name) for name in reader.names()})
        return writer.finish([record], state, reader.source_dir)


def card_of(checkpoint: Path, output: Path, **options: Any) -> str:
    return (
        export_checkpoint(checkpoint, output, **{"check": False, "say": silent, **options}) / "README.md"
    ).read_text()


def test_it_tells_settings_usage_and_training_of_a_trained_checkpoint(tmp_path: Path) -> None:
    model = make_aha(aha_loss_coefficient=0.002)
    step = trained(imported(model, tmp_path, "Base|1B"), tmp_path / "run", STATE)
    card = card_of(step, tmp_path / "out")
    for row in (
        r"| base model | Base\|1B |",
        "| window | 8 tokens, the token itself included |",
        "| sink tokens | 0 |",
        "| granularity | a router for each query head |",
        "| lambda, weight of the router loss | 0.002 |",
        "On the training batch of step 10, share of token-heads that took *all*:",
        "| 0 | 25.0% |",
        "| 1 | 75.0% |",
        "| all | 50.0% |",
        "| steps | 10 |",
        "| tokens | 5120 |",
        "| training.lr | 0.0003 |",
        "| training.schedule | wsd |",
        "trust_remote_code=True",
    ):
        assert row in card, row
    assert not (tmp_path / "out" / "origin.json").exists()
    head = front_matter(tmp_path / "out" / "README.md")
    assert head["base_model"] == "Base|1B" and head["library_name"] == "transformers"
    assert "license" not in head and "its folder named none" in card


def test_without_a_recorded_step_the_check_measures_and_without_a_check_nothing_is_said(
    tmp_path: Path,
) -> None:
    step = imported(make_aha(), tmp_path)
    card = card_of(step, tmp_path / "out")
    assert "Not recorded: no training step and no check" in card and "%" not in card
    assert "None recorded: the checkpoint (step 0) holds weights alone" in card
    said: list[str] = []
    card = card_of(step, tmp_path / "checked", check=True, say=said.append)
    assert "On random tokens, by the check that ends the export" in card
    shares = [float(line.split("|")[2].strip().rstrip("%")) for line in card.splitlines() if "%" in line]
    assert len(shares) == 3 and all(1 < share < 99 for share in shares)
    assert any("at most 1e-05" in line for line in said)


def test_only_layers_with_routers_are_listed(tmp_path: Path) -> None:
    step = imported(make_family("olmo3", True), tmp_path)
    state = {**STATE, "usage": [[0.0] * 4, [0.0] * 4, [0.0] * 4, [0.5] * 4]}
    card = card_of(trained(step, tmp_path / "run", state), tmp_path / "out")
    assert "| layers with routers | 1 of 4 |" in card
    assert [line for line in card.splitlines() if "%" in line] == ["| 3 | 50.0% |", "| all | 50.0% |"]


def test_the_licence_of_the_source_comes_along_and_its_card_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "models--acme--Base-1B" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nlicense: other\nlicense_name: acme-1\ntags: [a]\n---\n# The best model\n"
    )
    for name in ("LICENSE.txt", "NOTICE"):
        (folder / name).write_text("do no harm")
    step = imported(make_aha(), folder.parent, "0123")
    card = card_of(step, tmp_path / "out")
    head = front_matter(tmp_path / "out" / "README.md")
    assert (head["license"], head["license_name"], head["base_model"]) == ("other", "acme-1", "acme/Base-1B")
    assert (
        "license other, license_name acme-1" in card and "The files LICENSE.txt, NOTICE came with it" in card
    )
    assert "The best model" not in card and (tmp_path / "out" / "LICENSE.txt").exists()
    again = import_checkpoint(tmp_path / "out", tmp_path / "again", check=False, say=silent)
    assert "| base model | acme/Base-1B |" in card_of(again, tmp_path / "out2")


def test_a_dense_export_has_a_card_and_a_name_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "Base-1B").mkdir()
    # what a dense model was made of is not what ours was made of
    (tmp_path / "Base-1B" / "README.md").write_text("---\nbase_model: acme/Older\n---\n")
    step = imported(make_llama(), tmp_path)
    assert "# Base-1B, exported from" in card_of(step, tmp_path / "unnamed")
    options = [
        "--checkpoint",
        str(tmp_path / "ours"),
        "--output",
        str(tmp_path / "out"),
        "--skip-logits-check",
    ]
    convert_to_hf([*options, "--base-model", "acme/Dense"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# acme/Dense, exported from megatron_aha" in card
    assert "trust_remote_code" not in card and "Usage" not in card


@pytest.mark.parametrize("text", ["", "no head", "---\n: [\n---\n", "---\n- a\n---\n", "---\nlicense: mit\n"])
def test_a_card_that_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    assert front_matter(tmp_path / "README.md") == {}
    assert front_matter(tmp_path / "missing.md") == {}
