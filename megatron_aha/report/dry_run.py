"""What a run would be, in text, without the hardware it asks for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from megatron_aha.config.families import FAMILIES
from megatron_aha.config.parse import to_yaml
from megatron_aha.config.run import RunConfig
from megatron_aha.config.validate import problems
from megatron_aha.data.checks import plan_splits
from megatron_aha.errors import UserError
from megatron_aha.report.batch import batch_arithmetic, expected_world_size
from megatron_aha.report.flops import step_flops
from megatron_aha.report.memory import GIB, estimate_memory
from megatron_aha.report.parameters import stage_parameters, total_parameters


def print_dry_run(config: RunConfig) -> int:
    """Prints the report on rank 0 and returns the exit status: 0, or 2 when something is incompatible."""
    world_size = expected_world_size(config)
    if os.environ.get("RANK", "0") == "0":
        print(dry_run_report(config, world_size), end="", flush=True)
    return 2 if problems(config, world_size) else 0


def dry_run_report(config: RunConfig, world_size: int, has_gpu: bool | None = None) -> str:
    """Returns the report of ``--dry-run``: configuration, sizes, and every incompatibility found.

    Args:
        config: the resolved configuration, the model's sizes taken from the checkpoint already.
        world_size: ranks of the run, from ``expected_world_size``.
        has_gpu: whether the run will have GPUs; None when not known.
    """
    found = problems(config, world_size, has_gpu)
    sections = [("Configuration", to_yaml(config).rstrip().splitlines())]
    if _can_be_counted(config):
        sections += [
            ("Parameters", list(_parameters(config))),
            ("Batch", list(_batch(config, world_size))),
            ("Memory per rank, estimated (leave a fifth free)", list(_memory(config, world_size))),
        ]
    remarks = list(_remarks(config))
    if remarks:
        sections.append(("Remarks", remarks))
    verdict = found or ["none"]
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    sections.append((f"Incompatibilities on {ranks}", [f"- {line}" for line in verdict]))
    return "\n\n".join("\n".join([f"== {title}", *lines]) for title, lines in sections) + "\n"


def _can_be_counted(config: RunConfig) -> bool:
    """Returns whether every size is positive and every stage has a layer; what does not divide is rounded down."""
    if config.model.family not in FAMILIES:
        return False
    sizes = [
        config.model.num_layers,
        config.model.hidden_size,
        config.model.ffn_hidden_size,
        config.model.num_attention_heads,
        config.model.num_query_groups,
        config.model.head_dim,
        config.model.vocab_size,
        config.parallel.tensor_model_parallel_size,
        config.parallel.pipeline_model_parallel_size,
        config.parallel.context_parallel_size,
        config.training.micro_batch_size,
        config.training.global_batch_size,
        config.training.train_steps,
        config.data.seq_length,
        config.aha.window,
    ]
    return min(sizes) >= 1 and config.model.num_layers >= config.parallel.pipeline_model_parallel_size


def _parameters(config: RunConfig) -> Iterator[str]:
    yield f"whole model: {total_parameters(config.model, config.aha):,}"
    counts = stage_parameters(config.model, config.aha, config.parallel)
    if len(counts) == 1:
        yield f"per rank: {counts[0]:,}"
    for stage, count in enumerate(counts if len(counts) > 1 else []):
        yield f"per rank of pipeline stage {stage}: {count:,}"


def _batch(config: RunConfig, world_size: int) -> Iterator[str]:
    parallel, training, batch = config.parallel, config.training, batch_arithmetic(config, world_size)
    yield (
        f"ranks: {world_size} = tensor {parallel.tensor_model_parallel_size} x "
        f"pipeline {parallel.pipeline_model_parallel_size} x context {parallel.context_parallel_size} x "
        f"data {batch.data_parallel_size}"
    )
    yield (
        f"sequences per step: {training.global_batch_size} = micro-batch {training.micro_batch_size} x "
        f"data {batch.data_parallel_size} x accumulation {batch.accumulation_steps}"
    )
    yield f"tokens per step: {batch.tokens_per_step:,} in sequences of {config.data.seq_length:,}"
    yield f"tokens of the run: {batch.total_tokens:,} in {training.train_steps:,} steps"
    lengths = [config.data.seq_length] * training.global_batch_size
    flops = step_flops(config.model, config.aha, lengths, 1.0, training.freeze_model)
    yield f"operations per step: {flops.dense_equivalent / 1e12:,.3f} TFLOP with full attention everywhere"


def _memory(config: RunConfig, world_size: int) -> Iterator[str]:
    data_parallel_size = batch_arithmetic(config, world_size).data_parallel_size
    estimates = estimate_memory(config, data_parallel_size)
    for stage, estimate in enumerate(estimates):
        where = f"stage {stage}: " if len(estimates) > 1 else ""
        listed = ", ".join(f"{name} {_size(size)}" for name, size in dataclasses.asdict(estimate).items())
        yield f"{where}{_size(estimate.total)} = {listed}"


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def _remarks(config: RunConfig) -> Iterator[str]:
    """Yields what is possible but hardly meant, and data that is not there yet or not for this model."""
    aha, data, training = config.aha, config.data, config.training
    if data.blend:
        try:
            plan_splits(config, contents=False)
        except UserError as error:
            yield f"the run would stop at its data as it is here: {error}"
    if aha.enabled and aha.window + aha.num_sink_tokens >= data.seq_length:
        yield (
            f"--aha.window {aha.window} covers the whole of --data.seq_length {data.seq_length}: both "
            "choices are equal, and the routers learn from their own loss only"
        )
    if aha.enabled and aha.router_grad == "none":
        yield "--aha.router_grad none: the routers learn from their own loss only, and close"
    if config.logging.directory is None:
        yield "--logging.directory is not set: nothing is written for TensorBoard"
    if config.checkpoint.directory is None:
        yield "--checkpoint.directory is not set: nothing will be saved"
    if training.eval_interval == 0:
        yield "--training.eval_interval is 0: the run is never evaluated"
