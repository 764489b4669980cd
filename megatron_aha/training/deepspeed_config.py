"""DeepSpeed's configuration, built from ours so that each quantity is stated once."""

from __future__ import annotations

from typing import Any

from megatron_aha.config.training import TrainingConfig


def deepspeed_config(training: TrainingConfig, data_parallel_size: int, replicas: int) -> dict[str, Any]:
    """Returns the dictionary for ``deepspeed.initialize``.

    Args:
        training: batch sizes, precision, ZeRO stage, clipping, and the user's further DeepSpeed keys, which
            ``megatron_aha.config.validate`` has checked not to contradict ours.
        data_parallel_size: parts into which the samples of a step are cut.
        replicas: ranks that hold the same parameters: more than that under context parallelism, whose ranks DeepSpeed
            counts as if each had sequences of its own.
    """
    accumulation = training.global_batch_size // (training.micro_batch_size * data_parallel_size)
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": training.micro_batch_size * accumulation * replicas,
        # Under ZeRO-0 the engine clips itself, see TrainingEngine.
        "gradient_clipping": training.clip_grad if training.zero_stage > 0 else 0.0,
        "bf16": {"enabled": training.precision == "bf16"},
        # A scale of 0 is DeepSpeed's word for a dynamic one.
        "fp16": {"enabled": training.precision == "fp16", "loss_scale": 0},
        "data_types": {"grad_accum_dtype": "fp32" if training.fp32_gradients else None},
        "zero_optimization": {"stage": training.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Our own loop reports; DeepSpeed's prints would come once per rank.
        "steps_per_print": 2**31 - 1,
    }
    return _merge(ours, training.deepspeed)


def _merge(ours: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in extra.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
