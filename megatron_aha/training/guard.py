"""Steps that would harm the model: found before the optimizer uses their gradients."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from megatron_aha.config.training import SPIKE_WINDOW, TrainingConfig


class UpdateGuard:
    """Stands between DeepSpeed and Adam and lets no bad step's update through.

    DeepSpeed's ZeRO stages know the global gradient norm only inside their own step, just before they call Adam;
    there is no other place where it is complete and the weights are still untouched. Every rank sees the same
    loss and norm, so every rank decides alike.

    Args:
        adam: the torch optimizer that DeepSpeed calls; its ``step`` is replaced.
        sharded_norm: the gradient norm as DeepSpeed has it when it calls Adam.
        training: what counts as a spike.

    Attributes:
        recent_losses: the last good steps' losses, oldest first; a resumed run needs them to decide alike.
    """

    def __init__(
        self, adam: torch.optim.Optimizer, sharded_norm: Callable[[], float], training: TrainingConfig
    ) -> None:
        self.recent_losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._sharded_norm = sharded_norm
        self._spike_factor = training.spike_factor
        self._loss = math.nan
        self._norm: float | None = None
        self._fault: str | None = None
        apply = adam.step

        def step(*args: Any, **kwargs: Any) -> Any:
            norm = self._sharded_norm() if self._norm is None else self._norm
            self._fault = self.fault_of(self._loss, norm)
            return None if self._fault else apply(*args, **kwargs)

        adam.step = step  # type: ignore[method-assign]

    def expect(self, loss: float, norm: float | None) -> None:
        """Announces the step to come: its loss, and its gradient norm where DeepSpeed does not compute it."""
        self._loss, self._norm, self._fault = loss, norm, None

    def outcome(self, norm: float) -> str | None:
        """Returns after the step why its update was dropped, or None.

        Args:
            norm: the step's gradient norm; DeepSpeed itself drops some steps without ever calling Adam.
        """
        fault = self._fault or self.fault_of(self._loss, norm)
        if fault is None:
            self.recent_losses.append(self._loss)
        return fault

    def fault_of(self, loss: float, norm: float) -> str | None:
        """Returns what is wrong with a step, or None."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        # DeepSpeed reports a norm that is not finite as -1 or inf
        if not math.isfinite(norm) or norm < 0:
            return "the gradient norm is not finite"
        if self._spike_factor is None or len(self.recent_losses) < SPIKE_WINDOW:
            return None
        usual = statistics.median(self.recent_losses)
        if loss > self._spike_factor * usual:
            return f"the loss {loss:.4f} is more than {self._spike_factor:g} times the usual {usual:.4f}"
        return None
