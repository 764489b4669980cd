"""Asking a run to stop: a signal reaches one rank, all ranks agree at the next step boundary."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

import torch

from megatron_aha.parallel.layout import device

# The larger number wins where ranks were asked for different reasons.
REASONS = {1: "SIGUSR1", 2: "SIGTERM", 3: "the launcher is gone"}
SIGNALS = {signal.SIGUSR1: 1, signal.SIGTERM: 2}


class StopRequests:
    """Catches SIGTERM and SIGUSR1 within its ``with`` block, and a deepspeed launcher that has died.

    On one node the ``deepspeed`` command leaves its ranks running when it is killed or terminated: a rank whose
    launcher has gone asks to stop as if it had been signalled itself.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._launchers: tuple[int, int] | None = None

    def __enter__(self) -> StopRequests:
        self._previous = {number: signal.signal(number, self._ask) for number in SIGNALS}
        self._launchers = _deepspeed_launchers()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agreed(self) -> str | None:
        """Returns why the run should stop, the same on all ranks, or None (a collective over all ranks)."""
        asked = self._asked
        if self._launchers != _deepspeed_launchers():
            asked = 3
        most = torch.tensor([asked], device=device())
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        return REASONS.get(int(most))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = max(self._asked, SIGNALS[signal.Signals(number)])


def _deepspeed_launchers() -> tuple[int, int] | None:
    """Returns the process ids of this rank's launcher on the node and of its parent, the ``deepspeed`` command.

    None where another launcher started the rank: then a parent that ends (a shell behind nohup) means nothing.
    """
    if "CROSS_RANK" not in os.environ:  # set by deepspeed's launcher alone
        return None
    import psutil

    parent = os.getppid()
    try:
        return parent, psutil.Process(parent).ppid()
    except psutil.NoSuchProcess:
        return parent, 0
