"""One segment and KV group of a long call as matrices, and memory for one tile.

Scores are taken relative to a number known beforehand for each row (forward: its score with its own key, then its
log-sum-exp so far; backward: its log-sum-exp). So near and far parts need no running maximum and merge by
addition. Where scores differ so much that this leaves the range of the dtype, sums are not finite, and the caller
takes :mod:`aha_kernels.dense`. Scores are in units of ln 2: PyTorch's exp2 takes two thirds of the time of its exp.

Rows and keys are views of what the caller gave wherever its dtype and strides allow; what is computed from them lives
for one tile.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from aha_kernels.problem import Problem
from aha_kernels.tiles import FAR_KEYS, FAR_ROWS, FarRows, near_bands

LOG2E = math.log2(math.e)


class Group:
    """Rows [queries * group, dim] and keys and values [keys, dim] of one segment and KV group."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, dtype: torch.dtype) -> None:
        """q [queries, group, dim]; k, v [keys, dim]; dtype is what everything is computed in."""
        self.num_queries, self.group, self.dim = q.shape
        self.num_keys, self.dtype = k.shape[0], dtype
        self.queries, self.keys, self.values = self.rows(q), k.to(dtype), v.to(dtype)
        self.softmax_scale = problem.softmax_scale
        self.factor = problem.softmax_scale * LOG2E  # makes queries give scores in units of ln 2
        self.window, self.sinks = problem.window, min(problem.num_sink_tokens, self.num_keys)
        self.bands = near_bands(self.num_queries, self.num_keys, self.window, self.group)
        self._views: dict[tuple[int, ...], Tensor] = {}

    def rows(self, x: Tensor) -> Tensor:
        """Returns x [queries, group, ..] in the compute dtype as [rows, ..]: a view, if dtype and strides allow."""
        return x.to(self.dtype).flatten(0, 1)

    def column(self, x: Tensor) -> Tensor:
        """Returns x [queries, group] as [rows, 1]; a view as in rows."""
        return self.rows(x)[:, None]

    def deliver(self, rows: Tensor, target: Tensor) -> None:
        """Writes rows to the target that ``rows`` was asked for, unless they are a view of it."""
        if rows.data_ptr() != target.data_ptr():
            target.copy_(rows.view_as(target))

    @cached_property
    def _memory(self) -> tuple[Tensor, ...]:
        """The buffers of scratch: two for scores, three for rows of a far tile, in one piece."""
        largest = max(band.largest_batch(self.group, self.dim) for band in self.bands)
        scores = max(largest, FAR_ROWS * max(self.dim, min(FAR_KEYS, self.num_keys)))
        sizes = [
            -(-size // 16) * 16 for size in [scores] * 2 + [FAR_ROWS * self.dim] * 3
        ]  # whole cache lines
        return self.keys.new_empty(sum(sizes)).split(sizes)

    def scratch(self, buffer: int, *shape: int) -> Tensor:
        """Returns one of five tensors that every tile reuses, so that they stay in the cache; not initialised.

        Buffers 0 and 1 hold the scores of a tile, 2 to 4 [rows, dim] of a far tile.
        """
        key = (buffer, *shape)
        if key not in self._views:
            self._views[key] = self._memory[buffer][: math.prod(shape)].view(shape)
        return self._views[key]

    def taken(self, x: Tensor, rows: Tensor, buffer: int) -> Tensor:
        """Returns the given rows of x [rows, dim], as many as a far tile has, in a buffer of scratch."""
        return torch.index_select(x, 0, rows, out=self.scratch(buffer, len(rows), self.dim))

    def far_rows(self, wanted: Tensor) -> FarRows:
        """Returns the rows where wanted, bool [queries, group], is set and a key lies beyond window and sinks."""
        first = max(0, self.sinks + self.window - (self.num_keys - self.num_queries))
        return self._far_rows(wanted[first:].flatten().nonzero()[:, 0] + first * self.group)

    def sink_rows(self) -> FarRows:
        """Returns the rows whose window does not reach the first key: they see the sinks as keys apart."""
        first = max(0, self.window - (self.num_keys - self.num_queries)) if self.sinks else self.num_queries
        last = self.num_queries * self.group
        return self._far_rows(torch.arange(min(first * self.group, last), last, device=self.keys.device))

    def _far_rows(self, rows: Tensor) -> FarRows:
        return FarRows(rows, rows // self.group + (self.num_keys - self.num_queries - self.window + 1))


def all_finite(*tensors: Tensor) -> bool:
    """Returns False where a value is infinite or NaN (or where their sum is): a sum needs no memory."""
    return all(math.isfinite(float(x.sum())) for x in tensors)
