"""The loss scale of fp16 training, which DeepSpeed adjusts: small gradients would be zero in fp16 without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

# What DeepSpeed's dynamic scaler (deepspeed.runtime.fp16.loss_scaler) goes by; a static one has the scale alone.
_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScale:
    """The factor by which losses are multiplied before the backward pass; 1 in fp32 and bf16.

    DeepSpeed's ZeRO optimizers raise the scale before they divide the gradients by it, which makes such a step's
    gradients half of what they are (deepspeed 0.19, ``unscale_and_clip_grads``). Here the scale is raised afterwards.

    Args:
        engine: the DeepSpeed engine.
        precision: of the run.
    """

    def __init__(self, engine: Any, precision: str) -> None:
        self._optimizer = engine.optimizer if precision == "fp16" else None
        self._raise: Callable[[], None] | None = None
        if self._optimizer is not None:
            update = self._optimizer.loss_scaler.update_scale

            def update_scale(overflow: bool) -> None:
                if overflow:
                    update(overflow)
                else:
                    self._raise = partial(update, overflow)

            self._optimizer.loss_scaler.update_scale = update_scale

    @property
    def value(self) -> float:
        """The scale of the step to come."""
        return 1.0 if self._optimizer is None else float(self._optimizer.loss_scale)

    def end_step(self) -> None:
        """Raises the scale after a step, where it is due."""
        if self._raise is not None:
            self._raise()
        self._raise = None

    @property
    def overflowed(self) -> bool:
        """Whether the last step was dropped, and the scale lowered, because a gradient left fp16's range."""
        return self._optimizer is not None and bool(self._optimizer.overflow)

    def state(self) -> dict[str, float] | None:
        """Returns what a resumed run needs to scale alike; None in fp32 and bf16."""
        if self._optimizer is None:
            return None
        scaler = self._optimizer.loss_scaler
        return {name: getattr(scaler, name) for name in _STATE if hasattr(scaler, name)}

    def restore(self, state: dict[str, float] | None) -> None:
        """Goes on where a run was that saved this state; a run of another precision keeps its own."""
        if self._optimizer is not None:
            for name, value in (state or {}).items():
                setattr(self._optimizer.loss_scaler, name, value)
