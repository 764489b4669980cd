"""How much two sets of tensors differ."""

from __future__ import annotations

from torch import Tensor


def largest_relative_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Returns the largest relative L2 error over all tensors, and the name of its tensor."""
    assert actual.keys() == expected.keys()
    errors = {
        name: float((actual[name] - value).norm() / value.norm().clamp(min=1e-12))
        for name, value in expected.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst
