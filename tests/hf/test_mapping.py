"""Weights into our order and back, to the bit, and the same logits on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_models import make_aha, make_llama, random_tokens
from torch import Tensor

from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.checkpoint.weights import load_weights
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.training import TrainingConfig
from megatron_aha.hf.check import trainer_logits
from megatron_aha.hf.exporter import export_checkpoint
from megatron_aha.hf.importer import import_checkpoint
from megatron_aha.hf.mapping import weights
from megatron_aha.hf.rules import QKV
from megatron_aha.hf.source import open_source
from megatron_aha.testing.distributed import run_distributed

HEADS = [(4, 2), (4, 1), (4, 4)]


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize(("heads", "groups"), HEADS)
def test_rows_are_ordered_per_group_as_its_queries_its_key_its_value(heads: int, groups: int) -> None:
    model = ModelConfig(num_attention_heads=heads, num_query_groups=groups, head_dim=2, hidden_size=3)

    def numbered(first: int, count: int) -> Tensor:
        return torch.arange(first, first + count).repeat_interleave(2)[:, None].expand(-1, 3).float()

    parts = [numbered(100, heads), numbered(200, groups), numbered(300, groups)]
    rule = QKV(("q", "k", "v"))
    whole = rule.merge(parts, model)
    per_group = heads // groups
    expected = []
    for group in range(groups):
        expected += [100 + group * per_group + head for head in range(per_group)] + [200 + group, 300 + group]
    assert whole[::2, 0].tolist() == expected
    assert all(torch.equal(a, b) for a, b in zip(rule.split(whole, model), parts, strict=True))
    outline = rule.merge([part.to("meta", torch.bfloat16) for part in parts], model)
    assert (outline.is_meta, outline.shape, outline.dtype) == (True, whole.shape, torch.bfloat16)


def logits_on_two_ranks(folder: str, tokens: Tensor) -> Tensor:
    from megatron_aha.attention.packed import pack
    from megatron_aha.models.build import build_model
    from megatron_aha.parallel.layout import build_groups, device

    parallel = ParallelConfig(tensor_model_parallel_size=2)
    build_groups(parallel, seed=1)
    reader = CheckpointReader(folder)
    model = build_model(
        reader.model, reader.aha or AHAConfig(enabled=False), parallel, TrainingConfig(precision="fp32")
    )
    load_weights(model, reader, seed=0, new_router=False)
    length = tokens.numel()
    batch = pack(
        torch.arange(length),
        torch.tensor([0, length], dtype=torch.int32),
        torch.ones(length),
        device=device(),
    )
    return model.logits(tokens.flatten(), batch)


@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("routed", [False, True])
def test_import_and_export_are_bitwise_and_compute_the_same(
    tmp_path: Path, heads: int, groups: int, routed: bool
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups}
    original = make_aha(**sizes) if routed else make_llama(**sizes)
    original.save_pretrained(tmp_path / "hf")
    folder = import_checkpoint(tmp_path / "hf", tmp_path / "ours", check=False, say=silent)
    tokens = random_tokens(1, 40)
    expected = original(tokens).logits
    results = [trainer_logits(CheckpointReader(folder), tokens)[0]]
    if routed:
        results += [
            part[None] for part in run_distributed(logits_on_two_ranks, 2, str(folder), tokens, timeout=120)
        ]
    for ours in results:
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    export_checkpoint(folder, tmp_path / "back", check=False, say=silent)
    before, after = open_source(tmp_path / "hf"), open_source(tmp_path / "back")
    assert sorted(before.names()) == sorted(after.names())
    for name in before.names():
        assert torch.equal(before.read(name), after.read(name)), name
    config = after.config
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (heads, groups)


def test_an_imported_dense_model_starts_aha_training_dense(tmp_path: Path) -> None:
    """AHA on with a new router of bias 4: the logits are transformers' own of the dense model."""
    from megatron_aha.attention.packed import pack
    from megatron_aha.models.build import build_model
    from megatron_aha.parallel.layout import device, single_process

    original = make_llama()
    original.save_pretrained(tmp_path / "hf")
    reader = CheckpointReader(import_checkpoint(tmp_path / "hf", tmp_path / "ours", check=False, say=silent))
    tokens = random_tokens(1, 40)
    with single_process():
        model = build_model(
            reader.model, AHAConfig(window=8), ParallelConfig(), TrainingConfig(precision="fp32")
        )
        drawn = load_weights(model, reader, seed=0, new_router=True)
        batch = pack(
            torch.arange(40), torch.tensor([0, 40], dtype=torch.int32), torch.ones(40), device=device()
        )
        ours = model.logits(tokens[0], batch)
    assert len(drawn) == 4
    expected = original(tokens).logits[0]
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_every_weight_is_named_once() -> None:
    """No two of our weights are made of the same one of theirs, whatever the options."""
    for tied in (True, False):
        for aha in (None, AHAConfig(enabled=False), AHAConfig(bias=False), AHAConfig()):
            named = list(weights(ModelConfig(tied_embeddings=tied), aha))
            theirs = [name for weight in named for name in weight.theirs]
            assert len(theirs) == len(set(theirs)) and len(named) == len({weight.ours for weight in named})
            routers = [name for name in theirs if ".router." in name]
            assert len(routers) == 2 * (0 if aha is None or not aha.enabled else 1 + aha.bias)
            assert ("lm_head.weight" in theirs) != tied
