"""The quickstart's last step: the models side by side in plain transformers, as a stranger would load them.

Nothing of megatron_aha is imported here: an exported folder brings its own modelling code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = 'def read_lines(path):\n    """Return the lines of a text file, without line ends."""\n'
TOLERATED = 1.10


@dataclass
class Result:
    """One row of the table.

    Args:
        name: what the row is called.
        perplexity: exp of the mean negative log-likelihood per token, over the held-out sequences.
        usage: share of token-heads that take full attention; None for a model without routers.
        usage_beyond_window: the same over tokens that have a key beyond the window.
    """

    name: str
    perplexity: float
    usage: float | None
    usage_beyond_window: float | None


def load_model(path: Path) -> torch.nn.Module:
    """Returns a model in fp32 from an exported folder or a GGUF file."""
    if path.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.float32).eval()


def held_out_tokens(text: Path, tokenizer: Any, sequences: int, length: int) -> torch.Tensor:
    """Returns int64 [sequences, length]: the beginnings of the first documents that are long enough.

    Args:
        text: JSONL file with a ``text`` field per line.
        tokenizer: a Hugging Face tokenizer.
        sequences: rows wanted.
        length: tokens per row.
    """
    rows: list[list[int]] = []
    with text.open(encoding="utf-8") as lines:
        for line in lines:
            # four characters a token or less: a longer piece is never needed
            ids = tokenizer(json.loads(line)["text"][: 8 * length], add_special_tokens=False)["input_ids"]
            if len(ids) >= length:
                rows.append(ids[:length])
            if len(rows) == sequences:
                return torch.tensor(rows)
    sys.exit(f"error: {text} has {len(rows)} documents of {length} tokens or more, {sequences} are needed")
