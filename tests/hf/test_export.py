"""What an exported folder holds."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_aha, make_llama, random_tokens, save_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megatron_aha.checkpoint.format import CheckpointReader, CheckpointWriter
from megatron_aha.config.model import ModelConfig
from megatron_aha.errors import UserError
from megatron_aha.hf.exporter import export_checkpoint
from megatron_aha.hf.importer import import_checkpoint


def silent(_: str) -> None:
    pass


def round_trip(model: Any, work: Path, **options: Any) -> Path:
    """Saves, imports and exports a model; what was saved is gone afterwards."""
    model.save_pretrained(work / "hf")
    folder = import_checkpoint(work / "hf", work / "ours", check=False, say=silent)
    shutil.rmtree(work / "hf")
    return export_checkpoint(folder, work / "out", check=False, say=silent, **options)


def one_step(model: torch.nn.Module) -> None:
    """Trains every weight a little."""
    tokens = random_tokens(2, 24)
    model.train()
    model(tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("routed", [True, False])
def test_tied_and_untied_models_keep_their_keys_flag_and_logits(
    tmp_path: Path, tied: bool, routed: bool
) -> None:
    model = (make_aha if routed else make_llama)(tie_word_embeddings=tied)
    one_step(model)
    out = round_trip(model, tmp_path)
    names = set(load_file(out / "model.safetensors"))
    assert ("lm_head.weight" in names) != tied
    assert names == {name for name, _ in model.named_parameters()}
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert config["architectures"] == ["LlamaAHAForCausalLM" if routed else "LlamaForCausalLM"]
    assert (out / "modeling_llama_aha.py").exists() == routed
    again = type(model).from_pretrained(out).eval()
    tokens = random_tokens(1, 40)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    head, embedding = again.get_output_embeddings().weight, again.get_input_embeddings().weight
    assert (head.data_ptr() == embedding.data_ptr()) == tied


def test_the_shard_index_is_the_union_of_the_shards_and_sizes_add_up(tmp_path: Path) -> None:
    model = make_aha()
    out = round_trip(model, tmp_path, shard_bytes=160_000)
    shards = sorted(out.glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
    ]
    assert len(shards) == 3
    index = json.loads((out / "model.safetensors.index.json").read_text())
    held = {name: path.name for path in shards for name in load_file(path)}
    assert index["weight_map"] == held
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert index["metadata"]["total_size"] == total
    assert all(path.stat().st_size < 165_000 for path in shards)
    tokens = random_tokens(1, 20)
    assert torch.equal(type(model).from_pretrained(out).eval()(tokens).logits, model(tokens).logits)


def test_tokenizer_chat_template_and_generation_config_come_along(tmp_path: Path) -> None:
    model = make_llama(vocab_size=305)
    save_tokenizer(tmp_path / "hf", words=300, added=5)
    model.generation_config = GenerationConfig(eos_token_id=[2, 7], temperature=0.5, do_sample=True, top_k=11)
    out = round_trip(model, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == 305 and tokenizer("w1 <new4>")["input_ids"] == [5, 304]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w9"}], tokenize=False) == "w1 w9 w2 "
    again = AutoModelForCausalLM.from_pretrained(out).eval()
    assert again.generation_config.eos_token_id == [2, 7]
    assert (again.generation_config.temperature, again.generation_config.top_k) == (0.5, 11)
    assert again.get_input_embeddings().weight.shape[0] == 305
    inputs = tokenizer("w1 <new4>", return_tensors="pt")
    torch.manual_seed(0)
    generated = again.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=5)
    assert tokenizer.decode(generated[0]).startswith("w1 <new4>")


def test_a_generation_config_is_made_when_the_source_had_none(tmp_path: Path) -> None:
    model = make_llama()
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").unlink()
    folder = import_checkpoint(tmp_path / "hf", tmp_path / "ours", check=False, say=silent)
    out = export_checkpoint(folder, tmp_path / "out", check=False, say=silent)
    assert GenerationConfig.from_pretrained(out).eos_token_id == 2


@pytest.mark.parametrize("routed", [True, False])
def test_bf16_weights_come_back_to_the_bit(tmp_path: Path, routed: bool) -> None:
    model = (make_aha() if routed else make_llama()).to(torch.bfloat16)
    out = round_trip(model, tmp_path)
    weights = load_file(out / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert weights[name].dtype == torch.bfloat16 and torch.equal(weights[name], parameter)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_type_of_ones_own(tmp_path: Path) -> None:
    model = make_llama()
    out = round_trip(model, tmp_path, dtype=torch.bfloat16)
    weights = load_file(out / "model.safetensors")
    assert torch.equal(weights["model.norm.weight"], model.model.norm.weight.bfloat16())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_model_that_was_never_imported_is_exported_without_a_tokenizer(tmp_path: Path) -> None:
    model = make_llama()
    model.save_pretrained(tmp_path / "hf")
    reader = CheckpointReader(import_checkpoint(tmp_path / "hf", tmp_path / "ours", check=False, say=silent))
    with CheckpointWriter(tmp_path / "own", 3, reader.model, None) as writer:
        record = writer.write_file("a.safetensors", {name: reader.read(name) for name in reader.names()})
        writer.finish([record], state={})
    out = export_checkpoint(tmp_path / "own", tmp_path / "out", check=False, say=silent)
    config = json.loads((out / "config.json").read_text())
    assert config["eos_token_id"] is None and config["vocab_size"] == 301
    tokens = random_tokens(1, 20)
    again = AutoModelForCausalLM.from_pretrained(out).eval()
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_missing_and_unknown_weights_of_a_checkpoint_are_refused(tmp_path: Path) -> None:
    make_aha().save_pretrained(tmp_path / "hf")
    reader = CheckpointReader(import_checkpoint(tmp_path / "hf", tmp_path / "ours", check=False, say=silent))
    for left_out, name in (
        ("decoder.layers.1.mlp.linear_fc2.weight", "good"),
        ("decoder.layers.0.self_attention.router.bias", "router"),
    ):
        with CheckpointWriter(tmp_path / name, 1, reader.model, reader.aha) as writer:
            kept = {other: reader.read(other) for other in reader.names() if other != left_out}
            writer.finish([writer.write_file("a.safetensors", kept)])
        with pytest.raises(UserError, match=f"lacks the weight '{left_out}'"):
            export_checkpoint(tmp_path / name, tmp_path / "out", check=False, say=silent)
    with CheckpointWriter(tmp_path / "dense", 1, reader.model, None) as writer:
        everything = {other: reader.read(other) for other in reader.names()}
        writer.finish([writer.write_file("a.safetensors", everything)])
    with pytest.raises(UserError, match="router.bias', which its model does not have"):
        export_checkpoint(tmp_path / "dense", tmp_path / "out", check=False, say=silent)
    assert not (tmp_path / "out").exists()


def test_only_a_model_is_replaced_and_only_when_asked(tmp_path: Path) -> None:
    out = round_trip(make_llama(), tmp_path)
    (out / "left_over.safetensors").write_text("")
    with pytest.raises(UserError, match=r"--output .* holds a model already; .* replace it with --overwrite"):
        export_checkpoint(tmp_path / "ours", out, check=False, say=silent)
    assert (out / "left_over.safetensors").exists()
    export_checkpoint(tmp_path / "ours", out, overwrite=True, check=False, say=silent)
    assert not (out / "left_over.safetensors").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="is no exported model"):
        export_checkpoint(tmp_path / "ours", tmp_path / "mine", overwrite=True, check=False, say=silent)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    assert not list(tmp_path.glob(".tmp*"))


def test_others_may_read_what_was_written(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        out = round_trip(make_llama(), tmp_path)
    finally:
        os.umask(old)
    for folder in (out, tmp_path / "ours"):
        for path in folder.rglob("*"):
            assert path.stat().st_mode & 0o444 == 0o444, path


def test_a_checkpoint_of_no_family_we_export_has_no_mapping() -> None:
    from megatron_aha.hf.mapping import weights

    with pytest.raises(UserError, match="family 'mamba'"):
        list(weights(ModelConfig(family="mamba"), None))
