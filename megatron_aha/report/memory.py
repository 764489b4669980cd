"""An estimate of the memory that a rank needs, to be read before asking for the hardware.

It counts tensors, not the allocator's fragments, NCCL or the CUDA context: leave a fifth free. Activations
are what the backward pass needs, with attention that never stores its scores (arXiv 2205.05198 counts them
for another block). ZeRO divides states over the data-parallel ranks: stage 1 the optimizer's, stage 2 also
the gradients, stage 3 also the weights (arXiv 1910.02054).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.report.parameters import stage_parameters

GIB = 2**30


@dataclass
class MemoryEstimate:
    """Bytes on the fullest rank of one pipeline stage.

    Args:
        weights: parameters as the forward pass reads them.
        gradients: of the parameters.
        optimizer: fp32 masters and Adam's two moments.
        activations: kept from the forward to the backward pass, for every micro-batch in flight.
        logits: scores over the vocabulary and their gradient, on the last stage.
        buffers: where ZeRO collects gradients before it reduces them, of a fixed size.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(dataclasses.astuple(self))


def estimate_memory(config: RunConfig, data_parallel_size: int) -> list[MemoryEstimate]:
    """Returns the estimate for each pipeline stage."""
    training, parallel = config.training, config.parallel
    stages = parallel.pipeline_model_parallel_size
    size = _bytes_per_element(config)
    # Context-parallel ranks hold the same parameters, so ZeRO divides over them too.
    replicas = data_parallel_size * parallel.context_parallel_size
    shards = [replicas if training.zero_stage >= stage else 1 for stage in (1, 2, 3)]
    # fp32 needs no master copy of its own, but ZeRO keeps one of every shard all the same.
    has_master = training.precision != "fp32" or training.zero_stage >= 1
    estimates = []
    for stage, parameters in enumerate(stage_parameters(config.model, config.aha, parallel)):
        trained = parameters
        if training.freeze_model:
            dense = stage_parameters(config.model, _without_router(config), parallel)[stage]
            trained = parameters - dense
        estimates.append(
            MemoryEstimate(
                weights=parameters * size / shards[2],
                gradients=trained * (4 if training.fp32_gradients else size) / shards[1],
                optimizer=trained * (8 + 4 * has_master) / shards[0],
                activations=_activations(config) * _micro_batches_in_flight(config, stage),
                logits=_logits(config) if stage == stages - 1 else 0.0,
                buffers=_buffers(config),
            )
        )
    return estimates


def _micro_batches_in_flight(config: RunConfig, stage: int) -> float:
    """Returns how many micro-batches' activations of all its layers a stage holds at most (arXiv 2104.04473)."""
    stages, chunks = config.parallel.pipeline_model_parallel_size, config.parallel.virtual_pipeline_stages
    if chunks == 1:
        return stages - stage
    return (2 * (stages - stage - 1) + (chunks - 1) * stages + 1) / chunks


def _bytes_per_element(config: RunConfig) -> int:
    return 4 if config.training.precision == "fp32" else 2


def _without_router(config: RunConfig) -> AHAConfig:
    return dataclasses.replace(config.aha, enabled=False)


def _tokens(config: RunConfig) -> int:
    """Returns the tokens of a micro-batch that one context-parallel rank has."""
    whole = config.training.micro_batch_size * config.data.seq_length
    return whole // config.parallel.context_parallel_size


def _activations(config: RunConfig) -> float:
    """Returns the bytes that one micro-batch leaves on one rank of a stage."""
    layers = config.model.num_layers // config.parallel.pipeline_model_parallel_size
    per_layer = _tokens(config) * layer_bytes_per_token(config)
    if config.training.recompute != "full":
        return layers * per_layer
    # Only each layer's input is kept, and one layer at a time is whole again in the backward pass.
    kept = _tokens(config) * config.model.hidden_size * _bytes_per_element(config) / _sequence_shards(config)
    return layers * kept + per_layer


def _sequence_shards(config: RunConfig) -> int:
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1


def layer_bytes_per_token(config: RunConfig) -> float:
    """Returns the bytes per token that the backward pass of one layer needs, on one tensor-parallel rank."""
    model, aha, size = config.model, config.aha, _bytes_per_element(config)
    tensor_size = config.parallel.tensor_model_parallel_size
    # Each norm keeps its normalised states and their origin in fp32, each of the two blocks what it reads.
    normalised = 4 if model.traits.zero_centred_norms else size
    around = 2 * (model.traits.pre_norm + model.traits.post_norm)
    norms = model.hidden_size * (around * (normalised + 4) + 2 * size) / _sequence_shards(config)
    heads = model.num_attention_heads / tensor_size
    groups = max(model.num_query_groups / tensor_size, 1)
    # The projections, the rotated queries and keys, the output as attention and as the next projection read
    # it.
    attention = size * model.head_dim * (4 * heads + 3 * groups) + 4 * heads
    if model.traits.qk_norm != "none":
        attention += model.head_dim * (heads + groups) * (normalised + 4)
    contexts = config.parallel.context_parallel_size
    if contexts > 1:
        attention += (
            size * model.head_dim * 2 * groups * contexts
        )  # gathered keys and values of the whole row
    if config.training.recompute == "selective":
        attention -= size * model.head_dim * heads + 4 * heads
    if aha.enabled:
        attention += 8 * heads  # logits and probabilities
        if aha.router_grad != "none" and config.training.recompute != "selective":
            attention += size * model.head_dim * heads  # the other choice's output
    mlp = 5 * size * model.ffn_hidden_size / tensor_size
    return norms + attention + mlp


def _logits(config: RunConfig) -> float:
    rows = -(-config.model.vocab_size // config.parallel.tensor_model_parallel_size)
    # As computed, in fp32 for the loss, and their gradient.
    return _tokens(config) * rows * (_bytes_per_element(config) + 8)


def _buffers(config: RunConfig) -> float:
    zero = config.training.deepspeed.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    if config.training.zero_stage == 0 or not zero.get("contiguous_gradients", True):
        return 0.0
    count = 2 if zero.get("overlap_comm") and config.training.zero_stage < 3 else 1
    # DeepSpeed's own default, however small the model is.
    return count * float(zero.get("reduce_bucket_size", 5e8)) * _bytes_per_element(config)
