"""The optimisation itself: batch, schedule, optimizer, precision, ZeRO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Good steps whose median loss is the usual one that a spike stands out from.
SPIKE_WINDOW = 16


@dataclass
class TrainingConfig:
    """Options of the training loop.

    Args:
        train_steps: optimizer steps of the whole run, resumed ones included.
        micro_batch_size: sequences per forward pass and data-parallel rank.
        global_batch_size: sequences per optimizer step over all ranks; sets the accumulation steps.
        lr: peak learning rate of the model.
        min_lr: learning rate at the end of the decay.
        warmup_steps: steps of linear warm-up from 0.
        schedule: ``cosine``, ``wsd`` (warm-up, stable, decay) or ``constant``.
        decay_steps: wsd only: steps of the final linear decay; None means a tenth of the run.
        weight_decay: on matrices; norms and biases have none.
        adam_beta1: first moment's decay.
        adam_beta2: second moment's decay.
        adam_eps: Adam's epsilon.
        clip_grad: largest global gradient norm; 0 does not clip.
        precision: ``fp32``, ``bf16`` or ``fp16``: weights of 16 bits have fp32 masters (ZeRO >= 1); fp16 needs a GPU
            and has a dynamic loss scale, which ``training.deepspeed.fp16`` adjusts (``initial_scale_power``,
            ``loss_scale_window``, ``hysteresis``, ``min_loss_scale``).
        fp32_gradients: bf16 only: add up the micro-batches' gradients in fp32 (ZeRO 2 and 3).
        zero_stage: DeepSpeed ZeRO stage 0 to 3.
        recompute: activation recompute: ``none``, ``selective`` (attention only) or ``full`` (every layer).
        seed: of initialisation, data order and dropout.
        freeze_model: train the router only.
        bad_step: what follows a step whose loss or gradient norm is not finite, or whose loss is a spike; its update is
            never applied. ``stop`` ends the run, ``skip`` goes on with the next step, ``rollback`` first takes weights
            and optimizer back to the run's last checkpoint, while step, schedule and data go on.
        bad_step_limit: bad steps in a row that end the run whatever ``bad_step`` says.
        spike_factor: a loss above this multiple of the median of the last 16 good steps' is a spike; None: no loss is.
        eval_interval: steps between evaluations; 0 never evaluates.
        eval_steps: batches of one evaluation.
        threads_per_rank: CPU threads of each rank; None leaves OMP_NUM_THREADS as it is.
        deepspeed: further DeepSpeed configuration keys, merged into the generated one.
    """

    train_steps: int = 1000
    micro_batch_size: int = 1
    global_batch_size: int = 8
    lr: float = 1e-4
    min_lr: float = 1e-5
    warmup_steps: int = 100
    schedule: str = "cosine"
    decay_steps: int | None = None
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    precision: str = "bf16"
    fp32_gradients: bool = False
    zero_stage: int = 1
    recompute: str = "none"
    seed: int = 1234
    freeze_model: bool = False
    bad_step: str = "stop"
    bad_step_limit: int = 10
    spike_factor: float | None = None
    eval_interval: int = 0
    eval_steps: int = 8
    threads_per_rank: int | None = None
    deepspeed: dict[str, Any] = field(default_factory=dict)
