"""What is read from a Hugging Face folder, and what is refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_aha, make_llama, save_tokenizer
from safetensors.torch import load_file, save_file

from megatron_aha.checkpoint.format import CheckpointReader, CheckpointWriter
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig, RopeScaling
from megatron_aha.errors import UserError
from megatron_aha.hf.configuration import read_config, write_config
from megatron_aha.hf.importer import describe_import, import_checkpoint
from megatron_aha.hf.rope import read_rope, write_rope, write_rope_parameters

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "attention_factor": 1.5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_llama().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def load(source: Path, output: str = "ours", **options: Any) -> CheckpointReader:
    said: list[str] = []
    step = import_checkpoint(source, source.parent / output, check=False, say=said.append, **options)
    return CheckpointReader(step)


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "rope_parameters": None,
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "'GptOssForCausalLM' is not supported, .*attention sinks"),
        ({"architectures": ["MixtralForCausalLM"]}, "mixture of experts"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "multi-head latent attention"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"kv_lora_rank": 512}, "kv_lora_rank = 512"),
        ({"architectures": ["LlamaForCausalLm"]}, "did you mean 'LlamaForCausalLM'"),
        ({"architectures": None, "model_type": "mamba"}, "architecture 'mamba' is not supported"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope", "factor": 4.0}}, "type 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate = False"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "RoPE type 'dynamic' lacks factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
            "lacks low_freq_factor, high_freq_factor",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        (
            {
                "architectures": ["Olmo3ForCausalLM"],
                "rope_parameters": {
                    "full_attention": {"rope_theta": 5e5},
                    "sliding_attention": {"rope_theta": 1e4},
                },
            },
            "sliding_attention, type 'default' and base 10000.0, are not supported",
        ),
        ({"hidden_size": None}, "gives no hidden_size"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "it reads images; .*Gemma3ForCausalLM"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "it caps attention scores"),
        ({"architectures": ["Gemma3nForCausalLM"]}, "only the text models of Gemma 3"),
        ({**GEMMA, "hidden_act": None, "hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({**GEMMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({**GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({**GEMMA, "num_experts": 8}, "num_experts = 8"),
        ({**GEMMA, "query_pre_attn_scalar": 0.5}, "query_pre_attn_scalar = 0.5"),
        ({**GEMMA, "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters with 'rope_theta'"),
        (
            {**GEMMA, "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention, type 'linear'.*without scaling$",
        ),
    ],
)
def test_what_the_model_would_not_compute_is_refused_by_name_before_reading_weights(
    folder: Path, values: dict[str, Any], message: str
) -> None:
    change_config(folder, **values)
    (folder / "model.safetensors").write_bytes(b"")  # to look at it would fail with another sentence
    with pytest.raises(UserError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeScaling("llama3", **LLAMA3),
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}, RopeScaling("llama3", **LLAMA3)),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeScaling("llama3", **LLAMA3),
        ),
        ({"rope_theta": 5e5, "rope_scaling": None}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}, RopeScaling("linear", 4.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
            RopeScaling("dynamic", 4.0),
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}}, RopeScaling("yarn", **YARN)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {"type": "yarn", "factor": 4.0},
                "max_position_embeddings": 99,
            },
            RopeScaling("yarn", 4.0, original_max_position_embeddings=99),
        ),
    ],
)
def test_rope_is_read_and_written_in_both_spellings(
    spelling: dict[str, Any], expected: RopeScaling | None
) -> None:
    assert read_rope(spelling) == (5e5, expected)
    for by_layer_type in (True, False):
        assert read_rope(write_rope(5e5, expected, by_layer_type)) == (5e5, expected)
        assert read_rope(write_rope_parameters(5e5, expected, by_layer_type)) == (5e5, expected)


@pytest.mark.parametrize("old_spelling", [True, False])
@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
def test_logits_agree_at_the_last_position_under_scaled_rope(
    tmp_path: Path, old_spelling: bool, kind: str
) -> None:
    from megatron_aha.hf.check import trainer_logits

    scaling = {"rope_type": kind, **{"llama3": LLAMA3, "yarn": YARN, "linear": {"factor": 4.0}}[kind]}
    model = make_llama(rope_theta=5e5, rope_scaling=dict(scaling))
    model.save_pretrained(tmp_path / "hf")
    old = {"rope_theta": 5e5, "rope_scaling": scaling, "rope_parameters": None}
    new = {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e5, **scaling}}
    change_config(tmp_path / "hf", **(old if old_spelling else new))
    tokens = torch.randint(3, 301, (1, 250))
    ours, _ = trainer_logits(load(tmp_path / "hf"), tokens)
    theirs = model(tokens).logits
    assert (ours - theirs)[:, -1].abs().max() <= 1e-5 * theirs.abs().max()
    unscaled = make_llama(rope_theta=5e5)
    assert (unscaled(tokens).logits - theirs)[:, -1].abs().max() > 1e-3 * theirs.abs().max()


def test_sizes_options_and_routers_are_read_as_they_are_written(tmp_path: Path) -> None:
    for tied in (True, False):
        model = ModelConfig(
            rope_theta=5e5, rope_scaling=RopeScaling(), tied_embeddings=tied, rms_norm_eps=1e-6
        )
        assert read_config(write_config(model, None, "float32", {})) == (model, None)
        for aha in (AHAConfig(window=8, bias=False), AHAConfig(granularity="kv_group", num_sink_tokens=4)):
            assert read_config(write_config(model, aha, "float32", {})) == (model, aha)


def test_sizes_that_old_configurations_leave_out_are_derived() -> None:
    config = write_config(ModelConfig(num_query_groups=4), None, "float32", {})
    del config["num_key_value_heads"], config["head_dim"]
    model, _ = read_config(config)
    assert (model.num_query_groups, model.head_dim) == (4, 16)


def test_a_missing_an_unknown_and_a_misshapen_weight_are_named(folder: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    kept = load_file(folder / "model.safetensors")[name]
    change_weights(folder, lambda weights: weights.pop(name))
    with pytest.raises(UserError, match=f"lacks 1 weights.*'{name}'"):
        load(folder)
    change_weights(folder, lambda weights: weights.update({name: kept[:-1].clone()}))
    with pytest.raises(UserError, match=rf"'{name}' has shape \[31, 64\].*\[32, 64\]"):
        load(folder)
    bias = "model.layers.1.self_attn.k_proj.bias"
    change_weights(folder, lambda weights: weights.update({name: kept, bias: torch.zeros(32)}))
    with pytest.raises(UserError, match=f"does not have, the first is '{bias}'"):
        load(folder)
    assert not (folder.parent / "ours").exists()


def test_a_router_key_that_the_configuration_promises_must_be_there(tmp_path: Path) -> None:
    make_aha().save_pretrained(tmp_path / "hf")
    change_weights(tmp_path / "hf", lambda weights: weights.pop("model.layers.0.self_attn.router.bias"))
    with pytest.raises(UserError, match="lacks 1 weights.*router.bias"):
        load(tmp_path / "hf")


def test_tables_that_old_versions_stored_are_passed_over(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(folder, lambda weights: weights.update({name: torch.ones(8)}))
    assert not load(folder).has(name)


def test_a_tied_model_may_store_its_head_twice_but_not_differently(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    make_llama(tie_word_embeddings=True).save_pretrained(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": embedding.clone()}))
    assert not load(folder).has("output_layer.weight")
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(UserError, match="tie_word_embeddings"):
        load(folder)


def test_shards_must_hold_what_their_index_says(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    make_llama().save_pretrained(folder, max_shard_size="100KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert len(load(folder).weight_names()) == 15
    name = next(name for name, shard in index["weight_map"].items() if shard == shards[0])
    index["weight_map"][name] = shards[1]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{shards[1]} holds '{name}', but it does not"):
        load(folder, "again")
    (folder / shards[1]).unlink()
    with pytest.raises(UserError, match=f"names {shards[1]}, which is missing"):
        load(folder, "again")


def test_a_cut_shard_is_named_with_its_size(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=rf"model.safetensors \({path.stat().st_size} bytes\)"):
        load(folder)


def test_pickles_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pytorch_model.bin is a pickle, which is not read"):
        load(folder)


def test_what_is_no_source_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--source .*nothing does not exist"):
        load(tmp_path / "nothing")
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(UserError, match="is neither a folder nor a .gguf file"):
        load(tmp_path / "file.txt")
    with pytest.raises(UserError, match=r"config.json is missing"):
        load(tmp_path)
    make_llama().save_pretrained(tmp_path / "hf")
    step = load(tmp_path / "hf").folder
    for checkpoint in (step, step.parent):
        with pytest.raises(UserError, match="is a checkpoint already, which training starts from"):
            load(checkpoint, "again")
    with pytest.raises(UserError, match="--output .*file.txt is a file, not a folder"):
        describe_import(tmp_path / "hf", tmp_path / "file.txt")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_small_shards_and_a_type_of_ones_own(folder: Path, dtype: torch.dtype | None) -> None:
    reader = load(folder, shard_bytes=100_000, dtype=dtype)
    assert len(list(reader.folder.glob("*.safetensors"))) > 2
    weights = load_file(folder / "model.safetensors")
    ours = reader.read("decoder.final_layernorm.weight")
    assert ours.dtype == (dtype or torch.float32)
    assert torch.equal(ours, weights["model.norm.weight"].to(ours.dtype))


def test_a_training_run_is_not_overwritten(folder: Path) -> None:
    with CheckpointWriter(folder.parent / "run", 7, ModelConfig(), None) as writer:
        writer.finish([writer.write_file("a.safetensors", {"w": torch.zeros(1)})])
    with pytest.raises(UserError, match="folder of a training run"):
        load(folder, "run")
    load(folder)
    load(folder)  # an import may be repeated


def test_an_import_of_another_model_is_not_overwritten(folder: Path) -> None:
    output = folder.parent / "imported"
    import_checkpoint(folder, output, check=False, say=lambda _: None)
    other = folder.parent / "other"
    make_llama(num_hidden_layers=3).save_pretrained(other)
    with pytest.raises(UserError, match="num_layers is 2 there, and 3 in the source"):
        import_checkpoint(other, output, check=False, say=lambda _: None)
    assert CheckpointReader(output).model.num_layers == 2


def test_the_source_is_no_output(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match="is the source itself"):
        import_checkpoint(folder, folder / ".." / folder.name, check=False, say=lambda _: None)
    assert sorted(folder.rglob("*")) == before


def test_a_file_where_the_output_should_go_is_told(folder: Path) -> None:
    (folder.parent / "ours").write_text("precious")
    with pytest.raises(UserError, match="ours is a file, not a folder; choose another folder"):
        load(folder)


def test_a_tokenizer_larger_than_the_embedding_is_told(folder: Path) -> None:
    save_tokenizer(folder, words=300, added=5)
    said: list[str] = []
    import_checkpoint(folder, folder.parent / "ours", check=False, say=said.append)
    assert any("305 tokens, the embedding 301 rows" in line for line in said)


def test_a_router_of_the_source_is_kept(tmp_path: Path) -> None:
    model = make_aha(aha_granularity="kv_group", aha_num_sink_tokens=3)
    model.save_pretrained(tmp_path / "hf")
    reader = load(tmp_path / "hf")
    assert reader.aha == AHAConfig(window=8, num_sink_tokens=3, granularity="kv_group", bias=True)
    weight = reader.read("decoder.layers.1.self_attention.router.weight")
    assert torch.equal(weight, model.model.layers[1].self_attn.router.weight)
