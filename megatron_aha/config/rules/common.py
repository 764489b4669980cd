"""Sentences that several rules share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron_aha.config.run import RunConfig
from megatron_aha.errors import nearest


def value_of(config: RunConfig, name: str) -> object:
    """Returns the value of a dotted name such as ``training.lr``."""
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def at_least(config: RunConfig, minimum: float, names: Iterable[str]) -> Iterator[str]:
    """Yields a sentence for each named option that is stated and below ``minimum``."""
    for name in names:
        value = value_of(config, name)
        if value is not None and not value >= minimum:  # type: ignore[operator]
            yield f"--{name} is {value}, and must be at least {minimum}"


def above_zero(config: RunConfig, names: Iterable[str]) -> Iterator[str]:
    """Yields a sentence for each named option that is stated and not positive."""
    for name in names:
        value = value_of(config, name)
        if value is not None and not value > 0:  # type: ignore[operator]
            yield f"--{name} is {value}, and must be greater than 0"


def one_of(config: RunConfig, name: str, known: Sequence[str]) -> Iterator[str]:
    """Yields a sentence when the named option is not one of the known words."""
    value = str(value_of(config, name))
    if value not in known:
        yield f"--{name} '{value}' is not one of {', '.join(known)}{nearest(value, known)}"


def alternatives(values: Iterable[int], wanted: int) -> str:
    """Returns ``3, 1 or 9``: the values that would do, the nearest to what was wanted first."""
    words = [str(value) for value in sorted(values, key=lambda value: (abs(value - wanted), value))[:4]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def multiples(unit: int, wanted: int) -> str:
    """Returns ``1024 or 768``: the multiples of ``unit`` on both sides of what was wanted, the nearest first."""
    below = wanted - wanted % unit
    return alternatives([value for value in (below, below + unit) if value > 0], wanted)
