"""The mixture of datasets that a split draws from, as written on the command line or in YAML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_aha.data.prefix import resolve_prefix
from megatron_aha.errors import UserError


@dataclass(frozen=True)
class Blend:
    """Datasets and their shares.

    Args:
        prefixes: the datasets.
        weights: positive share of samples of each, in any unit; None draws in proportion to their tokens.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(items: Sequence[str | float], option: str) -> Blend:
    """Returns the blend written as ``[prefix, ...]`` or ``[weight, prefix, weight, prefix, ...]``.

    Args:
        items: what the user wrote.
        option: the option it was written for, as typed.

    Raises:
        UserError: nothing was given, weights and prefixes do not alternate, a weight is not a positive
            number, or a prefix names no dataset.
    """
    words = [str(item).strip() for item in items]
    if not words:
        raise UserError(f"{option} is empty: give the prefix of a dataset made by tools/preprocess_data.py")
    numbers = [_number(word) for word in words]
    if not any(number is not None for number in numbers):
        return Blend(tuple(resolve_prefix(word, option) for word in words), None)
    weights: list[float] = []
    prefixes: list[str] = []
    for position, (word, number) in enumerate(zip(words, numbers, strict=True)):
        if position % 2 == 0:
            if number is None:
                raise UserError(
                    f"{option}: '{word}' has no weight before it, though other datasets have; "
                    "write a weight before every prefix or before none"
                )
            if not (math.isfinite(number) and number > 0):
                raise UserError(
                    f"{option}: weight {word} must be a positive number; leave the dataset out instead"
                )
            weights.append(number)
        else:
            if number is not None:
                raise UserError(
                    f"{option}: weight {words[position - 1]} is followed by another number, {word}"
                )
            prefixes.append(resolve_prefix(word, option))
    if len(weights) > len(prefixes):
        raise UserError(f"{option}: no prefix follows the last weight, {words[-1]}")
    return Blend(tuple(prefixes), tuple(weights))


def parse_split(split: str, option: str = "--data.split") -> tuple[float, float, float]:
    """Returns the normalised shares of train, validation and test, written as ``98,1,1``; missing ones are 0.

    Raises:
        UserError: more than three shares, something that is no number, a negative share, or only zeros.
    """
    words = [word.strip() for word in split.split(",")]
    shares = [_number(word) for word in words]
    valid = [share for share in shares if share is not None and math.isfinite(share) and share >= 0]
    if len(words) > 3 or len(valid) < len(words) or sum(valid) <= 0:
        raise UserError(
            f"{option} '{split}' must be up to three shares for train, validation and test, such as '98,1,1'"
        )
    total = sum(valid)
    train, validation, test = (share / total for share in (*valid, 0.0, 0.0)[:3])
    return train, validation, test


def _number(word: str) -> float | None:
    """The number a word spells, or None; a file that is called like a number needs a ``./`` before it."""
    try:
        return float(word)
    except ValueError:
        return None


def dataset_name(prefix: str) -> str:
    """Returns the last part of a prefix, for reports."""
    return Path(prefix).name
