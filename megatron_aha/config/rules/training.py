"""Rules of the optimisation, of saving and of logging."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_aha.config.names import BAD_STEPS, PRECISIONS, RECOMPUTES, SCHEDULES
from megatron_aha.config.rules.common import above_zero, at_least, one_of
from megatron_aha.config.run import RunConfig

# DeepSpeed keys that are generated from our options: stating them twice could only contradict.
GENERATED = {
    "train_batch_size": "--training.global_batch_size",
    "train_micro_batch_size_per_gpu": "--training.micro_batch_size",
    "gradient_accumulation_steps": "--training.global_batch_size",
    "gradient_clipping": "--training.clip_grad",
    "optimizer": "--training.lr and its neighbours",
    "scheduler": "--training.schedule",
    "bf16": "--training.precision",
    "fp16.enabled": "--training.precision",
    "zero_optimization.stage": "--training.zero_stage",
    "data_types": "--training.fp32_gradients",
    "activation_checkpointing": "--training.recompute",
    "tensorboard": "--logging.directory",
}


def training_problems(config: RunConfig) -> Iterator[str]:
    """Yields a sentence for every impossible option of the loop."""
    counts = [
        "train_steps",
        "micro_batch_size",
        "global_batch_size",
        "eval_steps",
        "threads_per_rank",
        "bad_step_limit",
    ]
    yield from at_least(config, 1, [f"training.{name}" for name in counts])
    yield from at_least(config, 1, ["checkpoint.keep_last", "checkpoint.keep_every", "logging.log_interval"])
    not_negative = [
        "min_lr",
        "warmup_steps",
        "decay_steps",
        "weight_decay",
        "clip_grad",
        "eval_interval",
        "seed",
    ]
    yield from at_least(config, 0, [f"training.{name}" for name in not_negative])
    yield from at_least(config, 0, ["checkpoint.save_interval", "logging.heatmap_interval"])
    yield from above_zero(config, ["training.lr", "training.adam_eps"])
    for name in ("adam_beta1", "adam_beta2"):
        beta = getattr(config.training, name)
        if not 0 <= beta < 1:
            yield f"--training.{name} is {beta}, and must be at least 0 and below 1"
    yield from _schedule_problems(config)
    yield from _precision_problems(config)
    yield from one_of(config, "training.recompute", RECOMPUTES)
    yield from _bad_step_problems(config)
    if config.training.freeze_model and not config.aha.enabled:
        yield (
            "--training.freeze_model true trains the router only, but --aha.enabled false leaves no router; "
            "set one of them the other way"
        )
    if config.checkpoint.save_interval and config.checkpoint.directory is None:
        yield (
            f"--checkpoint.save_interval is {config.checkpoint.save_interval}, but "
            "--checkpoint.directory is not set; name a folder to save to"
        )
    if config.checkpoint.keep_every is not None and config.checkpoint.keep_last is None:
        yield (
            f"--checkpoint.keep_every is {config.checkpoint.keep_every}, but without --checkpoint.keep_last every "
            "checkpoint is kept; set that too, or leave both out"
        )
    yield from _deepspeed_problems(config.training.deepspeed)


def _bad_step_problems(config: RunConfig) -> Iterator[str]:
    training = config.training
    yield from one_of(config, "training.bad_step", BAD_STEPS)
    if training.spike_factor is not None and not training.spike_factor > 1:
        yield (
            f"--training.spike_factor is {training.spike_factor}, and must be above 1: it multiplies the usual loss"
        )
    if training.bad_step == "rollback" and not config.checkpoint.save_interval:
        yield (
            "--training.bad_step rollback goes back to the run's last checkpoint, but --checkpoint.save_interval is "
            f"{config.checkpoint.save_interval}; set it and --checkpoint.directory, or use --training.bad_step skip"
        )


def _schedule_problems(config: RunConfig) -> Iterator[str]:
    training = config.training
    yield from one_of(config, "training.schedule", SCHEDULES)
    if training.min_lr > training.lr:
        yield f"--training.min_lr {training.min_lr} is above --training.lr {training.lr}; lower it"
    if training.warmup_steps > training.train_steps:
        yield (
            f"--training.warmup_steps {training.warmup_steps} is longer than the run of "
            f"--training.train_steps {training.train_steps}; use {training.train_steps // 10} or so"
        )
    if training.decay_steps is None:
        return
    if training.schedule != "wsd":
        yield (
            f"--training.decay_steps {training.decay_steps} belongs to --training.schedule wsd, but the "
            f"schedule is {training.schedule}; leave one of them out"
        )
    elif training.warmup_steps <= training.train_steps < training.warmup_steps + training.decay_steps:
        yield (
            f"--training.warmup_steps {training.warmup_steps} and --training.decay_steps "
            f"{training.decay_steps} together are longer than the run of --training.train_steps "
            f"{training.train_steps}; use --training.decay_steps "
            f"{training.train_steps - training.warmup_steps} or less"
        )


def _precision_problems(config: RunConfig) -> Iterator[str]:
    training = config.training
    yield from one_of(config, "training.precision", PRECISIONS)
    if training.zero_stage not in (0, 1, 2, 3):
        yield f"--training.zero_stage is {training.zero_stage}, and must be 0, 1, 2 or 3"
    if training.precision in ("bf16", "fp16") and training.zero_stage == 0:
        yield (
            f"--training.precision {training.precision} needs fp32 master weights, which --training.zero_stage 0 does "
            "not keep; use --training.zero_stage 1"
        )
    if training.precision != "fp16" and "fp16" in training.deepspeed:
        yield (
            "--training.deepspeed.fp16 adjusts the loss scale of --training.precision fp16, but the precision is "
            f"{training.precision}; leave one of them out"
        )
    if training.fp32_gradients and training.precision != "bf16":
        yield (
            "--training.fp32_gradients true is for --training.precision bf16, but the precision is "
            f"{training.precision}; leave it false"
        )
    elif training.fp32_gradients and training.zero_stage not in (2, 3):
        yield (
            f"--training.fp32_gradients true does not work with --training.zero_stage {training.zero_stage}; use "
            "--training.zero_stage 2 or 3"
        )


def _deepspeed_problems(extra: dict[str, Any], prefix: str = "") -> Iterator[str]:
    if not isinstance(extra.get("zero_optimization", {}), dict):
        yield "--training.deepspeed.zero_optimization must be a mapping; set the stage by --training.zero_stage"
    for key, value in extra.items():
        name = f"{prefix}{key}"
        if name in GENERATED:
            yield f"--training.deepspeed.{name} is generated from {GENERATED[name]}; set that instead"
        elif isinstance(value, dict):
            yield from _deepspeed_problems(value, f"{name}.")
