"""The learning rate as a function of the step alone, so that a resumed run cannot lose or repeat it."""

from __future__ import annotations

import math

from megatron_aha.config.training import TrainingConfig


def learning_rate(training: TrainingConfig, step: int) -> float:
    """Returns the model's learning rate of an optimizer step.

    Warm-up is linear and reaches ``lr`` at step ``warmup_steps``; ``cosine`` then falls to ``min_lr`` at the end of the
    run; ``wsd`` stays and falls linearly over the last ``decay_steps``; ``constant`` stays.

    Args:
        training: schedule and rates.
        step: number of the step, from 1.
    """
    if step <= training.warmup_steps:
        return training.lr * step / training.warmup_steps
    if training.schedule == "constant":
        return training.lr
    if training.schedule == "wsd":
        decay_steps = training.decay_steps or max(training.train_steps // 10, 1)
        done = (step - (training.train_steps - decay_steps)) / decay_steps
        remaining = 1 - min(max(done, 0.0), 1.0)
    else:
        length = max(training.train_steps - training.warmup_steps, 1)
        done = min((step - training.warmup_steps) / length, 1.0)
        remaining = 0.5 * (1 + math.cos(math.pi * done))
    return training.min_lr + (training.lr - training.min_lr) * remaining
