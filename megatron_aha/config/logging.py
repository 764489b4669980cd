"""What a run reports while it trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LoggingConfig:
    """Options of monitoring.

    Args:
        directory: TensorBoard event files and ``metrics.jsonl``; None writes neither.
        log_interval: steps between console lines and scalars.
        heatmap_interval: steps between layer x head usage pictures; 0 draws one at the end only.
    """

    directory: str | None = None
    log_interval: int = 1
    heatmap_interval: int = 100
