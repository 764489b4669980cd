"""Qwen3 (dense): every query and key head is normalised."""

from __future__ import annotations

from megatron_aha.hf.families.base import COMMON, PRE_NORMS, QK_NORMS, HFFamily
from megatron_aha.hf.families.qwen2 import entries, windows

FAMILY = HFFamily(
    "qwen3", "Qwen3", {**COMMON, **PRE_NORMS, **QK_NORMS}, windows, entries, defaults={"head_dim": 128}
)
