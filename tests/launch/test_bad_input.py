"""What the user may get wrong is one sentence of ``launch/pretrain.sh``, told before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_aha.checkpoint.format import CheckpointWriter
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.errors import UserError
from megatron_aha.training.pretrain import main

FP32 = ["--training.precision", "fp32"]
DATA = ["--data.blend", "a"]


@pytest.fixture(autouse=True)
def as_if_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables, whatever ran before; changed ones are restored."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A checkpoint of the toy model with a window of 8 and a router without bias."""
    aha = AHAConfig(window=8, bias=False)
    with CheckpointWriter(tmp_path, 1, ModelConfig(num_layers=4), aha) as writer:
        writer.finish([writer.write_file("a.safetensors", {"w": torch.zeros(2)})])
    return str(tmp_path)


def sentences(*arguments: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        main(arguments)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--aha.window", "0"], "--aha.window is 0, but a token always sees itself"),
        (["--model.num_query_groups", "3"], "--model.num_query_groups 3 does not divide"),
        (["--training.zero_stage", "0"], "--training.precision bf16 needs fp32 master weights"),
        (
            ["--parallel.ranks_per_node", "8", "--parallel.nodes", "2"],
            "is 16 ranks, but the launcher started 1",
        ),
        (["--training.global_batch_size", "7", "--training.micro_batch_size", "2"], "is not a multiple of"),
        (["--checkpoint.init_from", "nowhere"], "nowhere is not a checkpoint"),
    ],
)
def test_an_impossible_run_is_one_sentence(arguments: list[str], sentence: str) -> None:
    (line,) = sentences(*DATA, *arguments)
    assert sentence in line


def test_a_gpu_backend_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert sentences(*DATA, "--aha.backend", "triton") == [
        "--aha.backend triton needs an NVIDIA GPU and there is none here; use auto or torch"
    ]


def test_a_checkpoint_of_another_model(checkpoint: str) -> None:
    arguments = ["--checkpoint.init_from", checkpoint, "--model.num_layers", "2", "--aha.bias", "true"]
    layers, bias = sentences(*DATA, *FP32, *arguments)
    assert layers.startswith("--model.num_layers is 2, but the checkpoint has 4;")
    assert bias.startswith("--aha.bias is True, but the checkpoint has False;")


def test_the_layout_must_fit_the_checkpoints_model_and_not_the_defaults(checkpoint: str) -> None:
    (line,) = sentences(*DATA, "--checkpoint.init_from", checkpoint, "--data.seq_length", "4096")
    assert "--data.seq_length 4096 is longer than --model.max_position_embeddings 2048" in line


def test_a_dry_run_takes_the_checkpoints_model(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DATA, "--checkpoint.init_from", checkpoint, "--dry-run"]) == 0
    report = capsys.readouterr().out
    assert "  num_layers: 4\n" in report and "  window: 8\n" in report


def test_a_run_is_not_continued_for_another_model(checkpoint: str, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "other", 0, ModelConfig(num_layers=6), None) as writer:
        writer.finish([writer.write_file("a.safetensors", {"w": torch.zeros(2)})])
    arguments = [*DATA, *FP32, "--checkpoint.directory", checkpoint, "--dry-run"]
    (line,) = sentences(*arguments, "--checkpoint.init_from", str(tmp_path / "other"))
    assert f"--checkpoint.directory {checkpoint} holds a run of another model" in line
    assert "num_layers is 4 there, and 6 in the latter; choose another --checkpoint.directory" in line
    # what the run started from may be gone by now
    assert main([*arguments, "--checkpoint.init_from", "gone"]) == 0


def test_ranks_that_do_not_fit_name_the_size_that_was_typed() -> None:
    (line,) = sentences(*DATA, *FP32, "--parallel.pipeline_model_parallel_size", "2")
    assert line.endswith("start 2 or change --parallel.pipeline_model_parallel_size")
