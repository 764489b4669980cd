"""Which tokens are read, and how they are cut into sequences."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DataConfig:
    """Datasets written by ``tools/preprocess_data.py``.

    Args:
        blend: prefixes of .bin/.idx pairs, optionally each preceded by its weight: ``[0.3, a, 0.7, b]``.
        split: shares of documents for train, validation and test, cut from ``blend``: ``98,1,1``.
        valid_blend: prefixes for validation alone; ``split`` must then give validation nothing.
        seq_length: tokens per sequence.
        reset_position_ids: positions restart at 0 after each end-of-document token.
        eod_mask_loss: end-of-document tokens carry no loss as inputs.
        cache_dir: where index caches live; None puts them beside the data.
    """

    blend: list[str] = field(default_factory=list)
    split: str = "98,1,1"
    valid_blend: list[str] = field(default_factory=list)
    seq_length: int = 1024
    reset_position_ids: bool = False
    eod_mask_loss: bool = False
    cache_dir: str | None = None
