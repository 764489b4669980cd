"""What a run measures, written where TensorBoard and a text editor both find it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megatron_aha.report.rewind import METRICS_FILE, USAGE_FILE, rewind, set_aside


class MetricsWriter:
    """Writes TensorBoard event files, ``metrics.jsonl`` with the same scalars and ``usage.jsonl``.

    One process of a run holds one. After a resume every step has one value again: what was written for
    later steps is removed first. A run that starts at step 0 in a used folder moves the old files to
    ``previous-1`` there.

    Args:
        directory: where the files go; created when missing.
        resume_step: optimizer steps already done; values of later steps are removed.
    """

    def __init__(self, directory: str | Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        if resume_step:
            rewind(self.directory, resume_step)
        else:
            set_aside(self.directory)
        # purge_step also reaches a TensorBoard that has been reading the folder all along.
        self._events = SummaryWriter(str(self.directory), purge_step=resume_step + 1, flush_secs=5)
        self._metrics = _appending(self.directory / METRICS_FILE)
        self._usage = _appending(self.directory / USAGE_FILE)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Writes named values of one step; a value that is not finite is ``null`` in ``metrics.jsonl``."""
        for tag, value in values.items():
            self._events.add_scalar(tag, value, step)
        finite = {tag: float(value) if math.isfinite(value) else None for tag, value in values.items()}
        _write_line(self._metrics, {"step": step, **finite})

    def usage_heatmap(self, step: int, usage: np.ndarray) -> None:
        """Draws the share of tokens routed to full attention, ``usage`` [layers, heads] in 0..1."""
        from megatron_aha.report.heatmap import draw_heatmap, to_pixels

        self._events.add_image("usage/heatmap", to_pixels(draw_heatmap(usage, step)), step, dataformats="HWC")
        _write_line(self._usage, {"step": step, "usage": np.round(usage.astype(float), 6).tolist()})

    def close(self) -> None:
        """Writes everything out and closes the files."""
        self._events.close()
        self._metrics.close()
        self._usage.close()


def _appending(path: Path) -> TextIO:
    return open(path, "a", encoding="utf-8", buffering=1)


def _write_line(file: TextIO, record: dict[str, Any]) -> None:
    file.write(json.dumps(record, allow_nan=False) + "\n")
