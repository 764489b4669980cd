"""Tokens added to a tokenizer, from text to the exported model, in layouts that do not divide their number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from data_helpers import ADDED, EOD, TEXT
from safetensors.torch import load_file
from torch import Tensor

from megatron_aha.data.preprocess import PreprocessOptions, preprocess
from megatron_aha.hf.exporter import export_checkpoint
from megatron_aha.hf.importer import import_checkpoint
from megatron_aha.hf.tokenizer import load_tokenizer
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.training.pretrain import main

ROWS = 305  # 300 and the 5 that the tokenizer's own vocab_size leaves out


@pytest.fixture
def run(hf_folder: Path, tmp_path: Path) -> list[str]:
    """Imports a tiny model with this tokenizer, preprocesses text, and returns the options of a run."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=ROWS, max_position_embeddings=64, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    shutil.copytree(hf_folder, tmp_path / "hf", dirs_exist_ok=True)
    import_checkpoint(tmp_path / "hf", tmp_path / "imported", check=False)
    lines = [json.dumps({"text": f"{ADDED[n % 5]} {n} {TEXT}{ADDED[4]}"}) for n in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    options = PreprocessOptions((str(tmp_path / "text.jsonl"),), str(tmp_path / "data"))
    sidecar = preprocess(options, load_tokenizer(str(tmp_path / "imported"), EOD))
    assert sidecar.largest_id == ROWS - 1
    return [
        *("--checkpoint.init_from", str(tmp_path / "imported")),
        *("--data.blend", f"[{tmp_path / 'data'}]"),
        *"--data.split 100,0,0 --data.seq_length 32 --aha.window 8 --training.precision fp32".split(),
        *"--training.global_batch_size 4 --training.train_steps 2 --training.warmup_steps 0".split(),
    ]


def test_added_tokens_are_trained_and_exported_with_every_row(run: list[str], tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    losses, before = [], LlamaForCausalLM.from_pretrained(tmp_path / "hf").get_input_embeddings().weight
    for ranks in (1, 2):
        folder = tmp_path / f"tp{ranks}"
        layout = ["--parallel.tensor_model_parallel_size", str(ranks)]
        layout += ["--checkpoint.directory", str(folder), "--logging.directory", str(folder / "logs")]
        assert run_distributed(main, ranks, [*run, *layout]) == [0] * ranks
        lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["train/lm_loss"] for line in lines])

        exported = export_checkpoint(folder, tmp_path / f"exported{ranks}", check=False)
        assert len(AutoTokenizer.from_pretrained(exported)) == ROWS
        rows = _embedding(exported)
        assert tuple(rows.shape) == (ROWS, 32)
        assert not rows[300:].equal(before[300:])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def _embedding(folder: Path) -> Tensor:
    """The rows as they are stored, which a model class might pad or cut."""
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
