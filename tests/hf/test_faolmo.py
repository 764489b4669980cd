"""The authors' format, against a writer and a computation of our own from its description."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hf_models import LAYERS, SIZES, WINDOW, random_tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_aha.checkpoint.format import CheckpointReader, CheckpointWriter
from megatron_aha.errors import UserError
from megatron_aha.hf.check import trainer_logits
from megatron_aha.hf.cli import convert_to_hf
from megatron_aha.hf.exporter import export_checkpoint
from megatron_aha.hf.importer import import_checkpoint

HEADS, GROUPS, HEAD_DIM, HIDDEN, FFN, VOCAB = 4, 2, 16, 64, 128, 301
EPS, THETA = 1e-5, 500000.0


def silent(_: str) -> None:
    pass


def described(folder: Path, **changes: object) -> dict[str, Tensor]:
    """Writes a random checkpoint as the format is described, and returns its weights."""
    torch.manual_seed(7)
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "model.norm.weight": 1 + 0.3 * torch.randn(HIDDEN),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN) * 0.1,
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            name + "self_attn.q_proj.weight": torch.randn(HEADS * HEAD_DIM + HEADS, HIDDEN) * 0.1,
            name + "self_attn.k_proj.weight": torch.randn(GROUPS * HEAD_DIM, HIDDEN) * 0.1,
            name + "self_attn.v_proj.weight": torch.randn(GROUPS * HEAD_DIM, HIDDEN) * 0.1,
            name + "self_attn.o_proj.weight": torch.randn(HIDDEN, HEADS * HEAD_DIM) * 0.1,
            name + "self_attn.q_norm.weight": 1 + 0.3 * torch.randn(HEADS * HEAD_DIM),
            name + "self_attn.k_norm.weight": 1 + 0.3 * torch.randn(GROUPS * HEAD_DIM),
            name + "post_attention_layernorm.weight": 1 + 0.3 * torch.randn(HIDDEN),
            name + "post_feedforward_layernorm.weight": 1 + 0.3 * torch.randn(HIDDEN),
            name + "mlp.gate_proj.weight": torch.randn(FFN, HIDDEN) * 0.1,
            name + "mlp.up_proj.weight": torch.randn(FFN, HIDDEN) * 0.1,
            name + "mlp.down_proj.weight": torch.randn(HIDDEN, FFN) * 0.1,
        }
    config = {
        **{key: value for key, value in SIZES.items() if key != "initializer_range"},
        "num_hidden_layers": LAYERS,
        "architectures": ["FAOlmoForCausalLM"],
        "model_type": "faolmo",
        "local_window_size": WINDOW,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        **changes,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return weights


def compute(weights: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits ``[tokens, vocab]`` and routes ``[layers, tokens, heads]``, float64, token by token and head by
    head as the paper describes them."""
    weights = {name: value.double() for name, value in weights.items()}

    def norm(states: Tensor, weight: Tensor) -> Tensor:
        return states / (states.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight

    def rotated(states: Tensor, position: int) -> Tensor:
        half = HEAD_DIM // 2
        angle = torch.tensor([position * THETA ** (-2 * i / HEAD_DIM) for i in range(half)]).double()
        first, second = states[:half], states[half:]
        return torch.cat(
            (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
        )

    states = weights["model.embed_tokens.weight"][tokens]
    length = len(tokens)
    all_routes = []
    for layer in range(LAYERS):
        part = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        fused = states @ part["self_attn.q_proj.weight"].T
        routes = fused[:, HEADS * HEAD_DIM :].sigmoid() > 0.5
        query = norm(fused[:, : HEADS * HEAD_DIM], part["self_attn.q_norm.weight"])
        key = norm(states @ part["self_attn.k_proj.weight"].T, part["self_attn.k_norm.weight"])
        value = states @ part["self_attn.v_proj.weight"].T
        output = torch.zeros(length, HEADS * HEAD_DIM, dtype=torch.float64)
        for head in range(HEADS):
            mine = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            shared = slice(head // 2 * HEAD_DIM, (head // 2 + 1) * HEAD_DIM)
            keys = torch.stack([rotated(key[s, shared], s) for s in range(length)])
            for t in range(length):
                first = 0 if routes[t, head] else max(0, t - WINDOW + 1)
                scores = keys[first : t + 1] @ rotated(query[t, mine], t) / math.sqrt(HEAD_DIM)
                output[t, mine] = scores.softmax(0) @ value[first : t + 1, shared]
        attended = output @ part["self_attn.o_proj.weight"].T
        states = states + norm(attended, part["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(states @ part["mlp.gate_proj.weight"].T)
        mlp = (gate * (states @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
        states = states + norm(mlp, part["post_feedforward_layernorm.weight"])
        all_routes.append(routes)
    logits = norm(states, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    return logits, torch.stack(all_routes)


def test_routes_and_logits_are_those_of_the_described_computation(tmp_path: Path) -> None:
    weights = described(tmp_path / "theirs")
    said: list[str] = []
    reader = CheckpointReader(import_checkpoint(tmp_path / "theirs", tmp_path / "ours", say=said.append))
    assert any("at most 1e-05" in line for line in said)
    tokens = random_tokens(1, 24)
    logits, router_logits = trainer_logits(reader, tokens)
    expected, routes = compute(weights, tokens[0])
    assert torch.equal(router_logits[:, 0] > 0, routes)
    assert 0.2 < routes.double().mean() < 0.8
    assert (logits[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_round_trip_is_bitwise_and_says_what_it_read(tmp_path: Path) -> None:
    weights = described(tmp_path / "theirs")
    folder = import_checkpoint(tmp_path / "theirs", tmp_path / "ours", check=False, say=silent)
    reader = CheckpointReader(folder)
    assert reader.aha is not None and (reader.aha.window, reader.aha.bias) == (WINDOW, False)
    convert_to_hf(
        [*("--checkpoint", str(folder)), *("--output", str(tmp_path / "back")), *("--format", "faolmo")]
    )
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(weights)
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["model_type"], config["local_window_size"]) == ("faolmo", WINDOW)
    assert not list((tmp_path / "back").glob("*.py"))
    # the same model in our own format, for a comparison
    export_checkpoint(folder, tmp_path / "aha", say=silent)


def with_bias(reader: CheckpointReader, folder: Path, value: float) -> Path:
    """Writes the checkpoint again with a router bias."""
    from dataclasses import replace

    assert reader.aha is not None
    with CheckpointWriter(folder, 1, reader.model, replace(reader.aha, bias=True)) as writer:
        weights = {name: reader.read(name) for name in reader.names()}
        for layer in range(LAYERS):
            weights[f"decoder.layers.{layer}.self_attention.router.bias"] = torch.tensor([0, 0, value, 0])
        return writer.finish([writer.write_file("a.safetensors", weights)])


def test_a_bias_is_refused_unless_it_is_zero(tmp_path: Path) -> None:
    weights = described(tmp_path / "theirs")
    reader = CheckpointReader(
        import_checkpoint(tmp_path / "theirs", tmp_path / "ours", check=False, say=silent)
    )
    options = {"check": False, "authors_format": True, "say": silent}
    with pytest.raises(UserError, match=r"no router bias, but 'decoder.layers.0.* \(up to 0.25\)"):
        export_checkpoint(with_bias(reader, tmp_path / "biased", 0.25), tmp_path / "back", **options)
    assert not (tmp_path / "back").exists()
    out = export_checkpoint(with_bias(reader, tmp_path / "zero", 0.0), tmp_path / "back", **options)
    assert set(load_file(out / "model.safetensors")) == set(weights)


def test_other_models_do_not_fit_the_format(tmp_path: Path) -> None:
    from hf_models import make_family

    for name, routed, message in (
        ("qwen3", True, "is a qwen3 model"),
        ("olmo2", False, "olmo2 model, dense"),
    ):
        make_family(name, routed).save_pretrained(tmp_path / f"{name}-hf")
        folder = import_checkpoint(tmp_path / f"{name}-hf", tmp_path / name, check=False, say=silent)
        with pytest.raises(UserError, match=message):
            export_checkpoint(folder, tmp_path / "out", check=False, authors_format=True, say=silent)


def test_a_missing_window_and_a_plain_query_projection_are_named(tmp_path: Path) -> None:
    described(tmp_path / "no_window", local_window_size=None)
    with pytest.raises(UserError, match="gives no local_window_size"):
        import_checkpoint(tmp_path / "no_window", tmp_path / "ours", check=False, say=silent)
    weights = described(tmp_path / "plain")
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file({**weights, name: weights[name][:-HEADS].clone()}, tmp_path / "plain" / "model.safetensors")
    with pytest.raises(UserError, match="q_proj.weight' has 64 rows, faolmo has 68: "):
        import_checkpoint(tmp_path / "plain", tmp_path / "ours", check=False, say=silent)
