"""Rules of the datasets' description; the files themselves are checked where they are opened."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_aha.config.rules.common import at_least
from megatron_aha.config.run import RunConfig


def data_problems(config: RunConfig) -> Iterator[str]:
    """Yields a sentence for every contradiction in what is to be read."""
    data, longest = config.data, config.model.max_position_embeddings
    if not data.blend:
        yield (
            "--data.blend names no dataset; give it the prefix of a .bin/.idx pair from "
            "tools/preprocess_data.py"
        )
    yield from _blend_problems("data.blend", data.blend)
    yield from _blend_problems("data.valid_blend", data.valid_blend)
    yield from at_least(config, 1, ["data.seq_length"])
    if data.seq_length > longest:
        yield (
            f"--data.seq_length {data.seq_length} is longer than --model.max_position_embeddings {longest}; "
            f"use {longest} or less"
        )
    yield from _split_problems(config)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _blend_problems(name: str, blend: list[str]) -> Iterator[str]:
    if not any(_number(item) is not None for item in blend):
        return
    pairs = list(zip(blend[::2], blend[1::2], strict=False))
    if len(blend) % 2 or any(
        _number(weight) is None or _number(prefix) is not None for weight, prefix in pairs
    ):
        yield (
            f"--{name} [{', '.join(blend)}] mixes weights and prefixes; "
            "give every prefix its weight in front of it, or none: [0.3, a, 0.7, b] or [a, b]"
        )
    elif any(not float(weight) > 0 for weight, _ in pairs):
        weights = ", ".join(weight for weight, _ in pairs)
        yield f"--{name} has the weights {weights}, which must be above 0; leave a dataset out instead"


def _split_problems(config: RunConfig) -> Iterator[str]:
    data, training = config.data, config.training
    shares = [_number(part) for part in data.split.split(",")]
    if len(shares) != 3 or any(share is None or share < 0 for share in shares):
        yield (
            f"--data.split '{data.split}' must be three shares for train, validation and test, each 0 or "
            "more; use 98,1,1"
        )
        return
    train, valid, _ = (float(share or 0) for share in shares)
    if not train > 0:
        yield f"--data.split '{data.split}' gives training nothing; use 98,1,1"
    if data.valid_blend and valid > 0:
        yield (
            f"--data.split '{data.split}' gives validation a share, but --data.valid_blend gives it its "
            "own data; use --data.split 100,0,0"
        )
    if training.eval_interval > 0 and not data.valid_blend and not valid > 0:
        yield (
            f"--training.eval_interval is {training.eval_interval}, but --data.split '{data.split}' gives "
            "validation nothing and --data.valid_blend is empty; use --data.split 98,1,1 or "
            "--training.eval_interval 0"
        )
