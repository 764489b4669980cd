"""Llama 2 and 3, SmolLM and SmolLM2, and what else calls itself Llama."""

from __future__ import annotations

from megatron_aha.hf.families.base import COMMON, PRE_NORMS, HFFamily

FAMILY = HFFamily("llama", "Llama", {**COMMON, **PRE_NORMS})
