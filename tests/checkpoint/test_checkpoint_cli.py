"""``tools/checkpoint.py``: what it prints, finds and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_aha.checkpoint.cli import main
from megatron_aha.checkpoint.format import CheckpointReader, CheckpointWriter
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.errors import UserError

WEIGHT = torch.randn(7, 3)


def save(directory: Path, step: int = 3) -> Path:
    """A bf16 weight with its fp32 master, a norm without one, a moment, a scalar; a source folder."""
    source = directory.parent / "source"
    source.mkdir(exist_ok=True)
    (source / "tokenizer.json").write_text("{}")
    tensors = {
        "w": WEIGHT.bfloat16(),
        "norm": torch.ones(3, dtype=torch.bfloat16),
        "optimizer.master.w": WEIGHT,
        "optimizer.exp_avg.w": WEIGHT * 2,
        "rng.00000.cpu": torch.tensor([1, 2], dtype=torch.uint8),
        "count": torch.tensor(5),
    }
    with CheckpointWriter(directory, step, ModelConfig(), AHAConfig(window=8)) as writer:
        return writer.finish([writer.write_file("a.safetensors", tensors)], {"step": step}, source)


def test_reshard_keeps_every_tensor_and_the_state_in_files_of_the_asked_size(tmp_path: Path) -> None:
    save(tmp_path / "run")
    assert main(["reshard", str(tmp_path / "run"), str(tmp_path / "out"), "--file-gb", "50e-9"]) == 0
    old, new = CheckpointReader(tmp_path / "run"), CheckpointReader(tmp_path / "out")
    new.verify()
    assert (new.step, new.model, new.aha, new.state) == (old.step, old.model, old.aha, old.state)
    assert new.names() == old.names()
    for name in old.names():
        assert new.dtype(name) == old.dtype(name)
        assert torch.equal(new.read(name), old.read(name))
    # 84 bytes of fp32 in rows of 12: two files of 48 bytes at most each.
    assert len(list(new.folder.glob("*.safetensors"))) > 4
    assert new.source_dir is not None and (new.source_dir / "tokenizer.json").exists()

    assert main(["reshard", str(new.folder), str(tmp_path / "one")]) == 0
    whole = CheckpointReader(tmp_path / "one")
    assert [path.name for path in whole.folder.glob("*.safetensors")] == ["part-00000.safetensors"]
    assert all(torch.equal(whole.read(name), old.read(name)) for name in old.names())


def test_extract_fp32_takes_the_masters_and_leaves_the_training_state(tmp_path: Path) -> None:
    save(tmp_path / "run")
    assert main(["extract-fp32", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    reader = CheckpointReader(tmp_path / "out")
    assert reader.names() == ["count", "norm", "w"]
    assert torch.equal(reader.read("w"), WEIGHT)
    assert not torch.equal(WEIGHT.bfloat16().float(), WEIGHT)
    assert reader.dtype("norm") == torch.float32
    assert reader.state is None


def test_verify_looks_at_every_step_and_names_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run", 3)
    folder = save(tmp_path / "run", 4)
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count(": whole\n") == 2

    path = folder / "a.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["verify", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr()
    assert printed.out == f"{folder.with_name('step_00000003')}: whole\n"
    assert "a.safetensors is damaged: its SHA-256 is" in printed.err
    assert main(["verify", str(tmp_path / "nowhere")]) == 1


def test_inspect_prints_step_sizes_and_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "run")
    assert main(["inspect", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "step_00000003: step 3\n" in printed
    assert '"window": 8' in printed
    assert "weights: 3 tensors, 25 elements, 56 bytes bfloat16, int64\n" in printed
    assert "optimizer: 2 tensors, 42 elements, 168 bytes float32\n" in printed
    assert main(["inspect", str(tmp_path / "run"), "--tensors", "*w"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "optimizer.exp_avg.w  [7, 3]  float32",
        "optimizer.master.w  [7, 3]  float32",
        "w  [7, 3]  bfloat16",
    ]


@pytest.mark.parametrize("command", ["reshard", "extract-fp32"])
def test_what_is_read_is_never_written_over(tmp_path: Path, command: str) -> None:
    folder = save(tmp_path / "run")
    for target in (tmp_path / "run", folder):
        with pytest.raises(UserError, match="is the checkpoint that is read"):
            main([command, str(tmp_path / "run"), str(target)])
    for size in ("0", "inf", "nan"):
        with pytest.raises(UserError, match=f"--file-gb is {float(size)}, and must be a number above 0"):
            main([command, str(tmp_path / "run"), str(tmp_path / "out"), "--file-gb", size])


@pytest.mark.parametrize("command", ["reshard", "extract-fp32"])
@pytest.mark.parametrize("target", ["file", "file/below"])
def test_a_file_where_the_output_should_go_is_told(tmp_path: Path, command: str, target: str) -> None:
    save(tmp_path / "run")
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match=f"cannot write .*: {tmp_path / 'file'} is a file, not a folder"):
        main([command, str(tmp_path / "run"), str(tmp_path / target)])
    assert (tmp_path / "file").read_text() == "precious"


def test_reshard_says_that_a_change_of_layout_does_not_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reshard", "--help"])
    assert "loads into any layout as it is" in " ".join(capsys.readouterr().out.split())
