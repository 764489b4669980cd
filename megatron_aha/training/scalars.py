"""What one training step is reported as: losses, rates, usage and speed by their TensorBoard tags."""

from __future__ import annotations

import resource

import torch
from megatron.core import parallel_state

from megatron_aha.config.run import RunConfig
from megatron_aha.data.batches import MicroBatch
from megatron_aha.report.flops import step_flops
from megatron_aha.training.engine import StepResult


def step_scalars(
    config: RunConfig, result: StepResult, micro_batches: list[MicroBatch], seconds: float
) -> dict[str, float]:
    """Returns the scalars of one training step by their TensorBoard tags.

    Args:
        config: of the run.
        result: what the step did.
        micro_batches: this rank's, for the lengths of its documents.
        seconds: wall time of the step.
    """
    router = result.router
    router_loss = 0.0 if router is None else router.router_loss
    values = {
        "train/lm_loss": result.lm_loss,
        "train/router_loss": router_loss,
        "train/total_loss": result.lm_loss + config.aha.loss_coefficient * router_loss,
        "train/grad_norm": result.grad_norm,
        "train/bad_step": float(result.fault is not None),
        "lr/model": 0.0 if config.training.freeze_model else result.learning_rates["matrices"],
    }
    if config.training.precision == "fp16":
        values["train/loss_scale"] = result.loss_scale
    if router is not None:
        values["lr/router"] = result.learning_rates["router"]
        values["usage/total"] = router.usage
        values["usage/beyond_window"] = router.usage_beyond_window
        for layer, usage in enumerate(router.usage_per_head.mean(1).tolist()):
            values[f"usage/layer_{layer:02d}"] = usage
    lengths = [length for batch in micro_batches for length in batch.cu_seqlens.diff().tolist()]
    flops = step_flops(
        config.model,
        config.aha,
        lengths,
        usage_beyond_window=1.0 if router is None else router.usage_beyond_window,
        frozen=config.training.freeze_model,
    )
    # This rank's documents stand for those of all data-parallel ranks.
    replicas = parallel_state.get_data_parallel_world_size()
    tokens = config.training.global_batch_size * config.data.seq_length
    values |= {
        "perf/step_seconds": seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/tflops_done": flops.done * replicas / seconds / 1e12,
        "perf/tflops_dense_equivalent": flops.dense_equivalent * replicas / seconds / 1e12,
        "memory/peak_gib": _peak_memory_gib(),
    }
    return values


def _peak_memory_gib() -> float:
    """Returns the largest memory this rank has held: of its GPU, or resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
