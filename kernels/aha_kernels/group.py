"""One segment and KV group of a long call as matrices, and sums of exponentials over its near and far keys.

Scores are taken relative to a number known beforehand for each row (forward: its score with its own key;
backward: its log-sum-exp), as one more column of the matrix product: ``[q, -reference] [k, 1]^T``. So near
and far parts need no running maximum and merge by addition. Where scores differ so much that this
leaves the range of the dtype, sums are not finite, and the caller takes :mod:`aha_kernels.dense`.
The rows hold both in units of ln 2: PyTorch's exp2 takes two thirds of the time of its exp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aha_kernels.problem import Problem
from aha_kernels.tiles import FAR_KEYS, FAR_ROWS, FarRows, FarTile, NearTile, near_tiles

LOG2E = math.log2(math.e)


def with_column(
    x: Tensor, column: Tensor | float, factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns x [.., dim] times factor as a matrix [rows, dim + 1], whose last column is ``column``."""
    dim = x.shape[-1]
    result = x.new_empty((*x.shape[:-1], dim + 1), dtype=dtype)
    result[..., :dim] = x
    if factor != 1.0:
        result[..., :dim] *= factor
    result = result.view(-1, dim + 1)
    result[:, dim] = column
    return result


class Group:
    """The rows and keys of one segment and KV group, as matrices: rows [queries * group, dim], keys [keys,
    dim].
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, dtype: torch.dtype) -> None:
        """q [queries, group, dim]; k, v [keys, dim]."""
        self.group, self.num_keys = q.shape[1], k.shape[0]
        self.num_queries, self.dim = q.shape[0], q.shape[2]
        self.softmax_scale = problem.softmax_scale
        self.window, self.sinks = problem.window, min(problem.num_sink_tokens, self.num_keys)
        self.queries = with_column(q, 0.0, problem.softmax_scale * LOG2E, dtype)
        self.keys, self.values = with_column(k, 1.0, 1.0, dtype), with_column(v, 1.0, 1.0, dtype)
        self.near = list(near_tiles(self.num_queries, self.num_keys, self.window, self.group))
        largest = max(tile.count * tile.queries * self.group * tile.width for tile in self.near)
        size = max(largest, FAR_ROWS * FAR_KEYS)
        # One tile of scores and one of their gradients, reused: memory that stays in the cache.
        self._buffers = [q.new_empty(size, dtype=dtype), q.new_empty(size, dtype=dtype)]

    def set_reference(self, reference: Tensor) -> None:
        """Puts the number that scores are taken relative to, [queries, group], into all rows."""
        self.refer(self.queries, reference.reshape(-1))

    def refer(self, rows: Tensor, reference: Tensor) -> None:
        """Puts a reference [rows] into the extra column of rows [rows, dim + 1]."""
        torch.mul(reference, -LOG2E, out=rows[:, self.dim])

    def far_rows(self, rows: Tensor) -> FarRows:
        """Returns the given sorted rows, without those that have no key beyond their window and the sinks."""
        first = self.sinks + self.window - (self.num_keys - self.num_queries)  # first query with a far key
        rows = rows[int(torch.searchsorted(rows, max(0, first) * self.group)) :]
        return FarRows(rows, self.group, self.num_queries, self.num_keys, self.window)

    def sink_rows(self) -> FarRows:
        """Returns the rows whose window does not reach the first key: they see the sinks as keys apart."""
        first = max(0, self.window - (self.num_keys - self.num_queries)) * self.group
        if self.sinks == 0:
            first = self.queries.shape[0]
        last = self.queries.shape[0]
        rows = torch.arange(min(first, last), last, device=self.queries.device)
        return FarRows(rows, self.group, self.num_queries, self.num_keys, self.window)

    def product(self, a: Tensor, b: Tensor, buffer: int) -> Tensor:
        """Returns the matrix product (or batch of them) a b in one of the two reused buffers."""
        shape = (*a.shape[:-1], b.shape[-1])
        result = self._buffers[buffer][: math.prod(shape)].view(shape)
        return torch.mm(a, b, out=result) if a.dim() == 2 else torch.bmm(a, b, out=result)

    def tile_rows(self, tile: NearTile, x: Tensor) -> Tensor:
        """Returns the rows of a near tile of x [rows, dim] as a view [tiles, rows, dim]."""
        first, size = tile.query * self.group, tile.queries * self.group
        return x[first : first + tile.count * size].view(tile.count, size, x.shape[1])

    def tile_keys(self, tile: NearTile, x: Tensor) -> Tensor:
        """Returns the keys of a near tile of x [keys, dim] as an overlapping view [tiles, keys, dim]."""
        stride = x.stride(0)
        return x.as_strided(
            (tile.count, tile.width, x.shape[1]),
            (tile.queries * stride, stride, 1),
            x.storage_offset() + tile.key * stride,
        )

    def near_weights(self, tile: NearTile) -> Tensor:
        """Returns exp(score - reference) [tiles, rows, keys] of a near tile."""
        scores = self.product(
            self.tile_rows(tile, self.queries), self.tile_keys(tile, self.keys).transpose(1, 2), buffer=0
        )
        tile.mask(scores, self.group, self.window)
        return scores.exp2_()

    def far_weights(self, rows: FarRows, tile: FarTile, queries: Tensor) -> Tensor:
        """Returns exp(score - reference) [rows, keys] of a far tile; queries [all rows, dim + 1]."""
        scores = self.product(
            queries[tile.row : tile.row_stop], self.keys[tile.key : tile.key_stop].T, buffer=0
        )
        rows.mask(tile, scores)
        return scores.exp2_()

    def accumulate_far(
        self,
        rows: FarRows,
        queries: Tensor,
        first_key: int,
        last_key: int | None,
        into: Tensor,
        totals: Tensor,
    ) -> None:
        """Adds weight * value to into [rows, dim] and weight to totals [rows], over the far keys of the
        rows.
        """
        for tile in rows.tiles(first_key, last_key):
            weights = self.far_weights(rows, tile, queries)
            at = slice(tile.row, tile.row_stop)
            into[at].addmm_(weights, self.values[tile.key : tile.key_stop, : self.dim])
            totals[at] += weights.sum(-1)

    def own_scores(self) -> Tensor:
        """Returns the score of each row with its own key [rows]: the reference of the forward pass."""
        queries = self.queries.view(self.num_queries, self.group, -1)[..., : self.dim]
        own_keys = self.keys[self.num_keys - self.num_queries :, None, : self.dim]
        return (queries * own_keys).sum(-1).view(-1) / LOG2E

    def near_sums(self) -> tuple[Tensor, Tensor]:
        """Returns the sums of weight * value [rows, dim] and of weights [rows] over near keys and sinks."""
        sums = torch.empty_like(self.queries[:, : self.dim])
        totals = torch.empty_like(sums[:, 0])
        for tile in self.near:
            weights = self.near_weights(tile)
            values = self.tile_keys(tile, self.values)[..., : self.dim]
            torch.bmm(weights, values, out=self.tile_rows(tile, sums))
            torch.sum(weights, -1, out=self.tile_rows(tile, totals[:, None])[..., 0])
        sinks = self.sink_rows()
        if len(sinks):
            at = slice(int(sinks.rows[0]), None)
            self.accumulate_far(sinks, self.queries[at], 0, self.sinks, sums[at], totals[at])
        return sums, totals


def all_finite(*tensors: Tensor) -> bool:
    """Returns whether no value is infinite or NaN."""
    return all(bool(x.isfinite().all()) for x in tensors)
