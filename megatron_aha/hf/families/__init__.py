"""The families of Hugging Face models that can be converted; a further one is a module here and a line below."""

from __future__ import annotations

from megatron_aha.hf.families import gemma3, llama, mistral, olmo2, olmo3, qwen2, qwen3
from megatron_aha.hf.families.base import OUTPUT, HFFamily

FAMILIES: dict[str, HFFamily] = {
    module.FAMILY.name: module.FAMILY for module in (llama, mistral, qwen2, qwen3, olmo2, olmo3, gemma3)
}

__all__ = ["FAMILIES", "OUTPUT", "HFFamily"]
