"""Where weights come from and where they go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """Options of loading and saving; the format is described in ``megatron_aha.checkpoint.format``.

    Args:
        init_from: checkpoint whose weights start the run (from ``tools/convert_from_hf.py``); step 0, new
            optimizer.
        directory: where this run saves, and from where it resumes when a complete checkpoint is there.
        fresh_optimizer: resume step and schedule, but start Adam's moments anew.
        save_interval: steps between saves; 0 saves at the end only.
        asynchronous: write beside the training, from a copy in memory of what each rank writes; a checkpoint is
            complete some steps later.
        keep_last: complete checkpoints to keep; older ones are removed. None keeps all.
        keep_every: checkpoints of steps that this number divides are never removed; None protects none.
    """

    init_from: str | None = None
    directory: str | None = None
    fresh_optimizer: bool = False
    save_interval: int = 0
    asynchronous: bool = False
    keep_last: int | None = None
    keep_every: int | None = None
