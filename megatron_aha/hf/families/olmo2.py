"""OLMo-2: norms after attention and MLP, and over all queries and all keys at once."""

from __future__ import annotations

from megatron_aha.hf.families.base import COMMON, POST_NORMS, QK_NORMS, HFFamily

FAMILY = HFFamily("olmo2", "Olmo2", {**COMMON, **POST_NORMS, **QK_NORMS}, defaults={"rms_norm_eps": 1e-5})
