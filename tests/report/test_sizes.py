"""Parameters and memory per rank by arithmetic, held against the model itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_aha.attention.packed import pack
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.config.training import TrainingConfig
from megatron_aha.models import build_model
from megatron_aha.parallel.layout import build_groups, device, single_process
from megatron_aha.report.memory import estimate_memory, layer_bytes_per_token
from megatron_aha.report.parameters import stage_parameters, total_parameters
from megatron_aha.testing.distributed import run_distributed

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=384,
    num_attention_heads=8,
    num_query_groups=2,
    vocab_size=303,
)


LAYOUTS = [(tensor_size, stages, tied) for tensor_size, stages in ((4, 1), (2, 2)) for tied in (True, False)]


def parallel_config(tensor_size: int, stages: int) -> ParallelConfig:
    return ParallelConfig(tensor_model_parallel_size=tensor_size, pipeline_model_parallel_size=stages)


def local_parameters() -> list[tuple[int, int]]:
    """Returns for each layout the parameters of this rank's part of the model, and its stage."""
    return [_local_parameters(parallel_config(*sizes), tied) for *sizes, tied in LAYOUTS]


def _local_parameters(parallel: ParallelConfig, tied: bool) -> tuple[int, int]:
    from megatron.core import parallel_state

    build_groups(parallel, seed=1)
    model = build_model(
        dataclasses.replace(MODEL, tied_embeddings=tied),
        AHAConfig(),
        parallel,
        TrainingConfig(precision="fp32"),
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    return count, parallel_state.get_pipeline_model_parallel_rank()


def test_each_rank_holds_as_many_parameters_as_predicted() -> None:
    per_rank = run_distributed(local_parameters, 4)
    for index, (*sizes, tied) in enumerate(LAYOUTS):
        model = dataclasses.replace(MODEL, tied_embeddings=tied)
        expected = stage_parameters(model, AHAConfig(), parallel_config(*sizes))
        for rank in per_rank:
            count, stage = rank[index]
            assert count == expected[stage], LAYOUTS[index]


@pytest.mark.parametrize(
    "aha", [AHAConfig(enabled=False), AHAConfig(bias=False), AHAConfig(granularity="kv_group")], ids=str
)
@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma3_text"])
def test_the_whole_model_has_as_many_parameters_as_predicted(aha: AHAConfig, family: str) -> None:
    sizes = dataclasses.replace(MODEL, family=family)
    with single_process():
        model = build_model(sizes, aha, ParallelConfig(), TrainingConfig(precision="fp32"))
    assert sum(parameter.numel() for parameter in model.parameters()) == total_parameters(sizes, aha)


def saved_bytes_per_token(config: RunConfig, tokens: int) -> float:
    """Returns the bytes a token that one layer's forward pass keeps for the backward pass, parameters left out."""
    build_groups(config.parallel, seed=1)
    one, three = (
        saved_bytes(dataclasses.replace(config.model, num_layers=n), config, tokens) for n in (1, 3)
    )
    return (three - one) / 2 / tokens


def saved_bytes(model: ModelConfig, config: RunConfig, tokens: int) -> int:
    network = build_model(model, config.aha, config.parallel, config.training)
    network.train()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = pack(
        torch.arange(tokens),
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.ones(tokens),
        device=device(),
    )
    words = torch.zeros(tokens, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(words, batch, words).sum()
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in own)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("precision", "recompute", "family"),
    [
        ("fp32", "none", "llama"),
        ("bf16", "none", "llama"),
        ("bf16", "selective", "llama"),
        ("bf16", "none", "gemma3_text"),
    ],
)
def test_the_activations_of_a_layer_are_estimated_within_a_tenth(
    precision: str, recompute: str, family: str, enabled: bool
) -> None:
    config = RunConfig(
        model=dataclasses.replace(MODEL, family=family),
        aha=AHAConfig(enabled=enabled, window=16),
        training=TrainingConfig(precision=precision, recompute=recompute),
    )
    (measured,) = run_distributed(saved_bytes_per_token, 1, config, 128)
    assert layer_bytes_per_token(config) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(1, 2, 2, 12 / 4), (2, 2, 2 / 4, 12 / 4), (3, 2 / 4, 2 / 4, 12 / 4)],
)
def test_zero_divides_states_over_the_data_parallel_ranks(
    stage: int, weights: float, gradients: float, optimizer: float
) -> None:
    config = RunConfig(model=MODEL, training=TrainingConfig(precision="bf16", zero_stage=stage))
    (estimate,) = estimate_memory(config, data_parallel_size=4)
    parameters = total_parameters(MODEL, config.aha)
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (
        weights * parameters,
        gradients * parameters,
        optimizer * parameters,
    )


def test_sequence_parallelism_and_recompute_save_activations() -> None:
    def activations(**options: object) -> float:
        parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=bool(options.get("sp")))
        training = TrainingConfig(recompute=str(options.get("recompute", "none")))
        return estimate_memory(RunConfig(model=MODEL, parallel=parallel, training=training), 1)[0].activations

    assert activations(recompute="full") < activations(recompute="selective") < activations()
    assert activations(sp=True) < activations()


def test_a_frozen_model_needs_no_gradients_of_its_weights() -> None:
    config = RunConfig(model=MODEL, training=TrainingConfig(freeze_model=True))
    (estimate,) = estimate_memory(config, data_parallel_size=1)
    routers = MODEL.num_layers * MODEL.num_attention_heads * (MODEL.hidden_size + 1)
    assert estimate.gradients == 2 * routers


def test_zero_collects_gradients_in_buffers_of_a_fixed_size() -> None:
    def buffers(zero_stage: int, **zero: object) -> float:
        training = TrainingConfig(
            zero_stage=zero_stage, deepspeed={"zero_optimization": zero} if zero else {}
        )
        return estimate_memory(RunConfig(model=MODEL, training=training), 2)[0].buffers

    assert buffers(1) == buffers(3) == 2 * 5e8
    assert buffers(2, overlap_comm=True, reduce_bucket_size=1000) == 2 * 2 * 1000
    assert buffers(0) == buffers(1, contiguous_gradients=False) == 0
