"""The types in which converters store weights."""

from __future__ import annotations

import torch

from megatron_aha.errors import UserError, nearest

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Returns the type that ``--dtype`` names, None for None. Raises UserError for an unknown name."""
    if name is None:
        return None
    if name not in DTYPES:
        raise UserError(f"--dtype {name} is not one of {', '.join(DTYPES)}{nearest(name, DTYPES)}")
    return DTYPES[name]
