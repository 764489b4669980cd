"""The quickstart's last step: the models side by side in plain transformers, as a stranger would load them.

Nothing of megatron_aha is imported here: an exported folder brings its own modelling code.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

PROMPT = 'def read_lines(path):\n    """Return the lines of a text file, without line ends."""\n'
NEW_TOKENS = 48
SEQUENCES, LENGTH = 6, 384
# AHA's perplexity over that of the dense model trained on the same tokens: above this, it has not worked.
TOLERATED = 1.10


@dataclass
class Result:
    """One row of the table.

    Args:
        model: what the row is called.
        perplexity: exp of the mean negative log-likelihood of a held-out token.
        usage: share of token-heads that took full attention; None for a model without routers.
        usage_beyond_window: the same over the tokens that have a key beyond the window.
    """

    model: str
    perplexity: float
    usage: float | None = None
    usage_beyond_window: float | None = None


def held_out_sequences(text: Path, tokenizer: Any) -> Iterator[list[int]]:
    """Yields ``SEQUENCES`` lists of ``LENGTH`` token ids: the beginnings of documents that are long enough.

    Args:
        text: JSONL file with a ``text`` field per line.
        tokenizer: a Hugging Face tokenizer.
    """
    found = 0
    with text.open(encoding="utf-8") as lines:
        for line in lines:
            # More characters than the sequence can hold: the rest of a long document need not be tokenized.
            ids = tokenizer(json.loads(line)["text"][: 20 * LENGTH], add_special_tokens=False)["input_ids"]
            if len(ids) >= LENGTH and found < SEQUENCES:
                found += 1
                yield ids[:LENGTH]
    if found < SEQUENCES:
        sys.exit(f"error: {text} has {found} documents of {LENGTH} tokens or more, {SEQUENCES} are needed")


@torch.inference_mode()
def measure(name: str, model: Any, sequences: list[list[int]]) -> Result:
    """Returns the row of one model.

    Args:
        name: what the row is called.
        model: a causal language model of transformers, with AHA routers or without.
        sequences: token ids, all of one length.
    """
    routed = hasattr(model.config, "aha_window")
    loss, usage, beyond = 0.0, 0.0, 0.0
    for ids in sequences:
        tokens = torch.tensor([ids])
        outputs = model(input_ids=tokens, **({"output_router_stats": True} if routed else {}))
        loss += torch.nn.functional.cross_entropy(outputs.logits[0, :-1].float(), tokens[0, 1:]).item()
        if routed:
            usage += outputs.router_usage.mean().item()
            beyond += outputs.router_usage_beyond_window.mean().item()
    count = len(sequences)
    perplexity = math.exp(loss / count)
    return Result(name, perplexity, usage / count, beyond / count) if routed else Result(name, perplexity)


def table(results: list[Result]) -> str:
    """Returns the rows as a Markdown table."""

    def share(value: float | None) -> str:
        return "1 (dense)" if value is None else f"{value:.3f}"

    lines = [
        "| model | held-out perplexity | usage of full attention | usage beyond the window |",
        "|---|---|---|---|",
    ]
    for row in results:
        cells = row.model, f"{row.perplexity:.3f}", share(row.usage), share(row.usage_beyond_window)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures the four models, writes the results, and fails when AHA has cost more than it may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, purpose in {
        "original": "the model as it was unpacked",
        "imported": "its export after the import, before training",
        "dense": "export of the model trained without routers",
        "aha": "export of the model trained with routers on the same tokens",
        "text": "held-out documents, JSONL",
        "output": "JSON file of the results; the table goes beside it, with the suffix .txt",
    }.items():
        parser.add_argument(f"--{name}", type=Path, required=True, help=purpose)
    options = parser.parse_args()

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.aha, trust_remote_code=True)
    sequences = list(held_out_sequences(options.text, tokenizer))
    rows = []
    for name, path in {
        "SmolLM2-135M-Instruct (4-bit GGUF, unpacked)": options.original,
        "imported": options.imported,
        "trained dense": options.dense,
        "trained with AHA, exported": options.aha,
    }.items():
        started = time.monotonic()
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.float32).eval()
        rows.append(measure(name, model, sequences))
        print(f"   {name}: {time.monotonic() - started:.0f} s", flush=True)

    prompt = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)
    generated = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    page = "\n".join(
        [
            f"Generated by the exported model ({NEW_TOKENS} tokens, greedy):",
            "",
            tokenizer.decode(generated[0]),
            "",
            f"{SEQUENCES} held-out sequences of {LENGTH} tokens, window of {model.config.aha_window} tokens:",
            "",
            table(rows),
            "",
        ]
    )
    options.output.with_suffix(".txt").write_text(page, encoding="utf-8")
    dense, aha = rows[2:]
    if not aha.perplexity <= TOLERATED * dense.perplexity:
        print(page)
        worst = f"{TOLERATED} x {dense.perplexity:.3f} (dense)"
        sys.exit(f"error: perplexity with AHA is {aha.perplexity:.3f}, above {worst}")
    options.output.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
