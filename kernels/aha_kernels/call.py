"""The tensors of one call on the torch path: whole, or views of one segment or KV group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from torch import Tensor

from aha_kernels.segments import Segment

_KEYS = ("k", "v")  # the tensors indexed by key; all others are indexed by query
_Cut = TypeVar("_Cut", bound="_PerHead")


@dataclass(frozen=True)
class _PerHead:
    """Tensors ``[batch, queries, heads, ..]``, those named in ``_KEYS`` ``[batch, keys, kv_heads, ..]``."""

    q: Tensor
    k: Tensor
    v: Tensor

    def _cut(self: _Cut, of_queries: Callable[[Tensor], Tensor], of_keys: Callable[[Tensor], Tensor]) -> _Cut:
        cut = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                cut[field.name] = (of_keys if field.name in _KEYS else of_queries)(value)
        return replace(self, **cut)

    def heads_of_group(self, kv_head: int, at_once: int) -> Iterator[slice]:
        """Yields the query heads of one KV group, at most ``at_once`` of them at a time."""
        group = self.q.shape[2] // self.k.shape[2]
        first, stop = kv_head * group, (kv_head + 1) * group
        for head in range(first, stop, at_once):
            yield slice(head, min(head + at_once, stop))

    def of_heads(self: _Cut, kv_head: int, heads: slice) -> _Cut:
        """Returns views of heads of one KV group, ``[batch, queries, heads, ..]`` and ``[batch, keys, 1, ..]``."""
        return self._cut(lambda x: x[:, :, heads], lambda x: x[:, :, kv_head : kv_head + 1])

    def of_segment(self: _Cut, segment: Segment) -> _Cut:
        """Returns views of one segment, ``[queries, heads, ..]`` and ``[keys, kv_heads, ..]``."""
        return self._cut(lambda x: x[segment.batch, segment.rows], lambda x: x[segment.batch, segment.keys])

    def part(self: _Cut, segment: Segment, kv_head: int, heads: slice) -> _Cut:
        """Returns views of one segment and heads of one KV group, ``[queries, heads, ..]`` and ``[keys, ..]``."""
        return self._cut(
            lambda x: x[segment.batch, segment.rows, heads],
            lambda x: x[segment.batch, segment.keys, kv_head],
        )


@dataclass(frozen=True)
class Activations(_PerHead):
    """What the forward pass reads and writes.

    Args:
        route: 0 or 1, in any dtype.
        out: output, in q's dtype.
        lse: log-sum-exp of the scores of the keys that the route chose, in the compute dtype.
        lse_here: the same of the near keys, for the router's gradient; None when that is not wanted. Only some
            methods write and read it.
    """

    route: Tensor
    out: Tensor
    lse: Tensor
    lse_here: Tensor | None

    @property
    def opens(self) -> Tensor:
        """Bool, whether the route is 1: made anew each time, because only parts of a call need it at once."""
        return self.route != 0


@dataclass(frozen=True)
class Gradients(_PerHead):
    """What the backward pass reads (``out``, ``probes``) and writes (``q``, ``route``) or adds to (``k``, ``v``).

    Args:
        out: gradient of the output.
        route: gets ``<dO, O_all - O_here>``; None when the router needs no gradient.
        probes: bool, the here-tokens that give the router a gradient; None when none does.
    """

    out: Tensor
    route: Tensor | None
    probes: Tensor | None
