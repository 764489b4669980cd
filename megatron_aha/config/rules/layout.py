"""Rules of the parallel layout: what must divide what."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_aha.config.rules.common import alternatives, at_least, multiples
from megatron_aha.config.run import RunConfig


def layout_problems(config: RunConfig, world_size: int | None) -> Iterator[str]:
    """Yields a sentence for everything the layout does not divide; ``world_size`` None: not known."""
    sizes = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
    sizes.append("virtual_pipeline_stages")
    names = [f"parallel.{name}" for name in [*sizes, "nodes", "ranks_per_node"]]
    too_small = list(at_least(config, 1, names))
    yield from too_small
    if too_small:
        return  # nothing can be divided by 0
    yield from _tensor_problems(config)
    yield from _sequence_problems(config)
    yield from _pipeline_problems(config)
    yield from _context_problems(config)
    if world_size is not None:
        yield from _world_problems(config, world_size)


def tensor_size_fits(config: RunConfig, size: int) -> bool:
    """Returns whether the model's heads, KV groups and FFN divide over ``size`` tensor-parallel ranks."""
    return not _undivided(config, size)


def _undivided(config: RunConfig, size: int) -> list[str]:
    """Returns the quantities, in words, that a tensor-parallel size does not divide."""
    model, aha = config.model, config.aha
    found = []
    if model.num_attention_heads % size:
        found.append(f"{model.num_attention_heads} attention heads")
    # More ranks than groups hold copies of a group's keys and values, as long as each group has as many
    # copies.
    if model.num_query_groups % size and (size < model.num_query_groups or size % model.num_query_groups):
        found.append(f"{model.num_query_groups} KV groups")
    elif model.num_query_groups % size and aha.enabled and aha.granularity == "kv_group":
        found.append(f"{model.num_query_groups} routers of --aha.granularity kv_group")
    if model.ffn_hidden_size % size:
        found.append(f"FFN width {model.ffn_hidden_size}")
    return found


def _tensor_problems(config: RunConfig) -> Iterator[str]:
    model, size = config.model, config.parallel.tensor_model_parallel_size
    if min(model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size) < 1:
        return  # already reported as a size that no model can have
    undivided = _undivided(config, size)
    if undivided:
        fitting = [t for t in range(1, model.num_attention_heads + 1) if tensor_size_fits(config, t)]
        yield (
            f"--parallel.tensor_model_parallel_size {size} does not divide the model's "
            f"{', '.join(undivided)}; use {alternatives(fitting, size)}"
        )


def _sequence_problems(config: RunConfig) -> Iterator[str]:
    parallel = config.parallel
    size = parallel.tensor_model_parallel_size
    if not parallel.sequence_parallel:
        return
    if size == 1:
        yield (
            "--parallel.sequence_parallel true needs --parallel.tensor_model_parallel_size above 1, "
            "which is 1; leave it false"
        )
    sequence, batch = config.data.seq_length, config.training.micro_batch_size
    contexts = parallel.context_parallel_size
    if batch * sequence % (size * contexts):
        shared = f" times --parallel.context_parallel_size {contexts}" if contexts > 1 else ""
        yield (
            f"--data.seq_length {sequence} times --training.micro_batch_size {batch} is "
            f"{batch * sequence} tokens, which --parallel.tensor_model_parallel_size {size}{shared} does not "
            "divide, as --parallel.sequence_parallel needs; use --data.seq_length "
            f"{multiples(size * contexts, sequence)}"
        )


def _context_problems(config: RunConfig) -> Iterator[str]:
    size, sequence = config.parallel.context_parallel_size, config.data.seq_length
    if size == 1:
        return
    if sequence % (2 * size):
        yield (
            f"--data.seq_length {sequence} cannot be cut into the {2 * size} equal chunks that "
            f"--parallel.context_parallel_size {size} shares out; use {multiples(2 * size, sequence)}"
        )


def _pipeline_problems(config: RunConfig) -> Iterator[str]:
    stages, layers = config.parallel.pipeline_model_parallel_size, config.model.num_layers
    chunks = config.parallel.virtual_pipeline_stages
    if chunks > 1 and stages == 1:
        yield (
            f"--parallel.virtual_pipeline_stages {chunks} needs --parallel.pipeline_model_parallel_size above 1, "
            "which is 1; use 1"
        )
    elif chunks > 1 and layers >= 1 and layers % stages == 0 and layers // stages % chunks:
        choices = [c for c in range(1, layers // stages + 1) if layers // stages % c == 0]
        yield (
            f"--parallel.virtual_pipeline_stages {chunks} does not divide the {layers // stages} layers of each of "
            f"--parallel.pipeline_model_parallel_size {stages} stages; use {alternatives(choices, chunks)}"
        )
    if layers >= 1 and layers % stages:
        choices = [s for s in range(1, layers + 1) if layers % s == 0]
        yield (
            f"--parallel.pipeline_model_parallel_size {stages} does not divide --model.num_layers {layers}; "
            f"use {alternatives(choices, stages)}"
        )
    elif config.training.freeze_model:
        yield from _untrained_stage_problems(config, layers // (stages * chunks) or 1)
    if stages > 1 and config.training.zero_stage in (2, 3):
        yield (
            f"--training.zero_stage {config.training.zero_stage} does not work with "
            f"--parallel.pipeline_model_parallel_size {stages}; use --training.zero_stage 1, or no pipeline"
        )


def _untrained_stage_problems(config: RunConfig, layers_per_chunk: int) -> Iterator[str]:
    """Yields a sentence when some pipeline stage would have nothing to train, which no schedule survives."""
    routed = {layer // layers_per_chunk for layer in config.model.routed_layers}
    for chunk in range(config.model.num_layers // layers_per_chunk):
        if chunk not in routed:
            first = chunk * layers_per_chunk
            yield (
                f"--training.freeze_model true trains routers only, but the pipeline stage of layers {first} to "
                f"{first + layers_per_chunk - 1} has none, since all of these have a static window; use fewer "
                f"--parallel.pipeline_model_parallel_size than {config.parallel.pipeline_model_parallel_size}"
            )
            return


def _world_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    parallel, training = config.parallel, config.training
    nodes, per_node = parallel.nodes, parallel.ranks_per_node
    if nodes is not None and per_node is not None and nodes * per_node != world_size:
        yield (
            f"--parallel.nodes {nodes} times --parallel.ranks_per_node {per_node} is {nodes * per_node} "
            f"ranks, but the launcher started {world_size}; check the hostfile, --num_nodes and "
            "--num_gpus"
        )
    elif nodes is not None and world_size % nodes:
        yield f"--parallel.nodes {nodes} does not divide the {world_size} ranks that the launcher started"
    elif per_node is not None and world_size % per_node:
        yield f"--parallel.ranks_per_node {per_node} does not divide the {world_size} ranks of the launcher"
    model_ranks = model_parallel_size(config)
    if world_size % model_ranks:
        kinds = ("tensor_model", "pipeline_model", "context")
        options = [f"--parallel.{kind}_parallel_size" for kind in kinds]
        split = [option for option in options if getattr(parallel, option.removeprefix("--parallel.")) > 1]
        yield (
            f"tensor {parallel.tensor_model_parallel_size} x pipeline "
            f"{parallel.pipeline_model_parallel_size} x context {parallel.context_parallel_size} "
            f"parallel sizes need a multiple of {model_ranks} ranks, but there are {world_size}; start "
            f"{multiples(model_ranks, world_size)} or change {' or '.join(split)}"
        )
        return
    data_ranks = world_size // model_ranks
    per_pass = training.micro_batch_size * data_ranks
    if per_pass >= 1 and training.global_batch_size % per_pass:
        yield (
            f"--training.global_batch_size {training.global_batch_size} is not a multiple of "
            f"--training.micro_batch_size {training.micro_batch_size} x {data_ranks} data-parallel ranks = "
            f"{per_pass}; use {multiples(per_pass, training.global_batch_size)}"
        )
        return
    stages = parallel.pipeline_model_parallel_size
    if parallel.virtual_pipeline_stages > 1 and training.global_batch_size // per_pass % stages:
        yield (
            f"--training.global_batch_size {training.global_batch_size} gives each data-parallel rank "
            f"{training.global_batch_size // per_pass} micro-batches, but --parallel.virtual_pipeline_stages "
            f"{parallel.virtual_pipeline_stages} needs a multiple of --parallel.pipeline_model_parallel_size {stages}; "
            f"use {multiples(per_pass * stages, training.global_batch_size)}"
        )


def model_parallel_size(config: RunConfig) -> int:
    """Returns the number of ranks that hold one copy of the model: tensor x pipeline x context."""
    parallel = config.parallel
    return (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.context_parallel_size
    )
