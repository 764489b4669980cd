"""Perplexity of given text by the position of its tokens, beside the usage of full attention there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_aha.data.record_text import record_text
from megatron_aha.data.sources import InputFile, RawRecord, find_inputs, read_chunks
from megatron_aha.errors import UserError
from megatron_aha.hf.loading import LoadedModel
from megatron_aha.hf.usage import UsageCounter

# Positions are counted together in powers of two from here on.
FIRST_BUCKET = 128


@dataclass
class Bucket:
    """Tokens at some positions of their sequence.

    Args:
        first: first position.
        last: last position.
        tokens: tokens that were predicted there.
        perplexity: exp of their mean negative log-likelihood.
        usage: share of token-heads that took full attention at these positions; None for a model without routers.
    """

    first: int
    last: int
    tokens: int
    perplexity: float
    usage: float | None


@dataclass
class TextResult:
    """What a model made of the text.

    Args:
        tokens: predicted tokens.
        perplexity: of all of them.
        usage: share of token-heads on full attention; None for a model without routers.
        usage_beyond_window: the same over tokens that have a key beyond their window; None where there is none.
        usage_per_layer: the first by layer with a router.
        buckets: by position.
        fingerprint: tells whether two models read the same tokens.
    """

    tokens: int
    perplexity: float
    usage: float | None
    usage_beyond_window: float | None
    usage_per_layer: list[float] | None
    buckets: list[Bucket]
    fingerprint: int


def read_texts(patterns: Sequence[str], json_key: str) -> list[str]:
    """Returns the documents of text files and JSON lines (``.jsonl``, also ``.gz``).

    Raises:
        UserError: a file is missing, is not UTF-8, a line of JSON has no text under the key, or no document has any.
    """
    files = find_inputs(patterns, "auto", option="--text")
    texts = [
        _text(file, record, json_key)
        for file in files
        for chunk in read_chunks(file)
        for record in chunk.records
    ]
    if not any(text.strip() for text in texts):
        raise UserError(f"--text {' '.join(patterns)}: no document with text is in there; name other files")
    return texts


def _text(file: InputFile, record: RawRecord, key: str) -> str:
    try:
        return record_text(record, file.is_jsonl, key)
    except (ValueError, RecursionError) as error:
        line = "" if record.line is None else f", line {record.line}"
        hint = "; --json-key names the key of the text" if file.is_jsonl else ""
        raise UserError(f"--text '{file.path}'{line}: {error}{hint}") from error


def bucket_starts(length: int) -> list[int]:
    """Returns the first positions of the buckets of sequences of `length` tokens: 0, 128, 256, 512, ..."""
    starts = [0]
    edge = FIRST_BUCKET
    while edge < length:
        starts.append(edge)
        edge *= 2
    return starts


def sequences(
    tokenizer: Any, texts: Sequence[str], length: int, max_tokens: int | None
) -> Iterator[list[int]]:
    """Yields documents cut into pieces of at most `length` tokens; pieces of one token predict nothing.

    Each piece begins with the tokenizer's beginning-of-text token where it has one: a model that always saw one
    in training is lost without (docs/evaluation.md).

    Args:
        tokenizer: its own beginning- and end-of-text tokens are added to each document.
        texts: documents.
        length: tokens of a piece.
        max_tokens: stop after so many tokens; None takes all.
    """
    left = math.inf if max_tokens is None else max_tokens
    for text in texts:
        # a bound on the text spares tokenizing what will not be read
        ids = tokenizer(text if max_tokens is None else text[: 20 * max_tokens], verbose=False)["input_ids"]
        begin = ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
        ids = ids[len(begin) :]
        for start in range(0, len(ids), length - len(begin)):
            piece = [*begin, *ids[start : start + length - len(begin)]][: int(min(length, left))]
            left -= len(piece)
            if len(piece) > 1:
                yield piece
            if left <= 1:
                return


@torch.inference_mode()
def measure_text(
    loaded: LoadedModel, texts: Sequence[str], length: int, max_tokens: int | None
) -> TextResult:
    """Returns perplexity and usage of a model on documents, one sequence at a time, in the model's own type.

    Args:
        loaded: the model and its tokenizer.
        texts: documents.
        length: tokens of a sequence, at most.
        max_tokens: read so many tokens; None reads all.

    Raises:
        UserError: the text has no two tokens, or the sequences are longer than the model's positions.
    """
    model = loaded.model
    longest = getattr(model.config, "max_position_embeddings", length)
    if length > longest:
        raise UserError(f"--length {length} is above the {longest} positions of {loaded.name}")
    starts = bucket_starts(length)
    loss = torch.zeros(len(starts), dtype=torch.float64)
    tokens = torch.zeros(len(starts), dtype=torch.int64)
    fingerprint = 0
    with UsageCounter(model, starts) as usage:
        for piece in sequences(loaded.needed_tokenizer(), texts, length, max_tokens):
            fingerprint = hash((fingerprint, *piece))
            ids = torch.tensor([piece], device=model.device)
            losses = _losses(model(input_ids=ids, use_cache=False).logits, ids)
            places = torch.bucketize(torch.arange(1, len(piece)), torch.tensor(starts), right=True) - 1
            loss.index_add_(0, places, losses.double().cpu())
            tokens.index_add_(0, places, torch.ones_like(places))
    if not int(tokens.sum()):
        raise UserError("--text holds no document of two tokens or more")
    buckets = [
        Bucket(first, last - 1, int(tokens[row]), _perplexity(loss[row], tokens[row]), usage.total(row))
        for row, (first, last) in enumerate(zip(starts, [*starts[1:], length], strict=True))
        if int(tokens[row])
    ]
    return TextResult(
        tokens=int(tokens.sum()),
        perplexity=_perplexity(loss.sum(), tokens.sum()),
        usage=usage.total(),
        usage_beyond_window=usage.total(beyond_window=True),
        usage_per_layer=usage.per_layer(),
        buckets=buckets,
        fingerprint=fingerprint,
    )


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns the negative log-likelihood of each token but the first, fp32 ``[tokens - 1]``."""
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")


def _perplexity(loss: Tensor, tokens: Tensor) -> float:
    return math.exp(min(float(loss / tokens), 700.0))
