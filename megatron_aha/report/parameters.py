"""How many parameters each rank holds, by arithmetic from the sizes alone."""

from __future__ import annotations

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.config.parallel import ParallelConfig


def router_parameters(model: ModelConfig, aha: AHAConfig) -> int:
    """Returns the parameters of a routed layer's routers, over all tensor-parallel ranks; 0 for a dense model."""
    if not aha.enabled:
        return 0
    routers = model.num_attention_heads if aha.granularity == "head" else model.num_query_groups
    return routers * (model.hidden_size + int(aha.bias))


def layer_parameters(model: ModelConfig, aha: AHAConfig, layer: int, tensor_size: int = 1) -> int:
    """Returns the parameters of a layer (from 0) that one of ``tensor_size`` tensor-parallel ranks holds."""
    # Also with more ranks than KV groups: Megatron-core cuts a group's rows then, and gathers their outputs.
    rows = (2 * model.num_attention_heads + 2 * model.num_query_groups) * model.head_dim
    attention = model.hidden_size * rows // tensor_size
    mlp = 3 * model.hidden_size * model.ffn_hidden_size // tensor_size
    if model.traits.qkv_bias:
        attention += (model.num_attention_heads + 2 * model.num_query_groups) * model.head_dim // tensor_size
    qk_norms = {
        "none": 0,
        "head": 2 * model.head_dim,
        "projection": (model.num_attention_heads + model.num_query_groups) * model.head_dim,
    }
    around = 2 * (model.traits.pre_norm + model.traits.post_norm)
    norms = around * model.hidden_size + qk_norms[model.traits.qk_norm]
    routers = 0 if model.window_of(layer) is not None else router_parameters(model, aha)
    return attention + mlp + norms + routers // tensor_size


def embedding_parameters(model: ModelConfig, tensor_size: int = 1) -> int:
    """Returns the parameters of the embedding on one rank, its rows padded to a multiple of the ranks."""
    return -(-model.vocab_size // tensor_size) * model.hidden_size


def stage_parameters(model: ModelConfig, aha: AHAConfig, parallel: ParallelConfig) -> list[int]:
    """Returns, for each pipeline stage, the parameters that each of its tensor-parallel ranks holds."""
    tensor_size, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    per_stage = model.num_layers // stages
    counts = [
        sum(layer_parameters(model, aha, layer, tensor_size) for layer in range(first, first + per_stage))
        for first in range(0, per_stage * stages, per_stage)
    ]
    embedding = embedding_parameters(model, tensor_size)
    counts[0] += embedding
    counts[-1] += model.hidden_size  # the last norm
    if stages > 1 or not model.tied_embeddings:
        counts[-1] += embedding  # a tied model's last stage holds a copy
    return counts


def total_parameters(model: ModelConfig, aha: AHAConfig) -> int:
    """Returns the parameters of the whole model, each counted once, without any padding."""
    return stage_parameters(model, aha, ParallelConfig())[0]
