"""Where the scores of one long segment lie: bands of near tiles, and tiles of compacted far rows.

Queries are numbered 0 .. rows - 1 and sit at positions ``keys - rows .. keys - 1``: the last query is the
last key. Rows of a KV group are interleaved, row ``query * group + head``, so that its heads share each
load of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# A tile of scores of far rows, and the scores of one batch of near tiles: with the gradients of as many scores they
# stay in the second-level cache. The latter are four tiles of 64 queries under a window of 256.
FAR_ROWS, FAR_KEYS, NEAR_SCORES = 384, 208, 4 * 64 * 320
BATCHES = 16  # of tiles in a band, whose views exist at the same time: together they are not small


@dataclass(frozen=True)
class NearBand:
    """``tiles`` tiles of ``queries`` queries each, the first at ``query``; tile i sees ``width`` keys from ``key + i *
    queries`` on. They are computed ``at_once`` tiles at a time.
    """

    query: int
    queries: int
    tiles: int
    key: int
    width: int
    own: int  # column of the first query's own key
    at_once: int

    @property
    def query_stop(self) -> int:
        """The query after the last of all tiles."""
        return self.query + self.tiles * self.queries

    def largest_batch(self, group: int, dim: int) -> int:
        """Returns the numbers that scores, or sums [rows, dim], of the tiles computed at once hold."""
        return self.at_once * self.queries * group * max(self.width, dim)

    def rows(self, x: Tensor, group: int) -> Tensor:
        """Returns the band's part of x [rows, ..] as a view [tiles, rows, ..]."""
        part = x[self.query * group : self.query_stop * group]
        return part.unflatten(0, (self.tiles, self.queries * group))

    def keys(self, x: Tensor) -> Tensor:
        """Returns the band's part of x [keys, dim] as a view [tiles, keys, dim], whose tiles overlap."""
        stride, step = x.stride()
        shape, strides = (self.tiles, self.width, x.shape[1]), (self.queries * stride, stride, step)
        return x.as_strided(shape, strides, x.storage_offset() + self.key * stride)

    def batches(self, *views: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yields views [tiles, ..] together, ``at_once`` tiles at a time."""
        return zip(*(view.split(self.at_once) for view in views), strict=True)

    def edges(self, scores: Tensor, group: int, window: int) -> list[tuple[Tensor, Tensor]]:
        """Returns the parts of scores [tiles, queries * group, width] that hold keys outside their query's window, as
        views, each with what to add: -inf there.
        """
        by_query = scores.view(-1, self.queries, group, self.width)
        right = self.own + 1
        future = _edge(self.queries, self.width - right, 0, True, scores.dtype, scores.device)
        found = [(by_query[..., right:], future)]
        hidden = right - window  # columns before the first query's window
        if hidden + self.queries - 1 > 0:
            edge = min(self.width, max(0, hidden) + self.queries - 1)
            past = _edge(self.queries, edge, hidden, False, scores.dtype, scores.device)
            found.append((by_query[..., :edge], past))
        return found


@lru_cache(maxsize=256)
def _edge(
    queries: int, width: int, shift: int, future: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns [queries, 1, width], -inf at keys in the future (column >= row) or past (column < row +
    shift).
    """
    row = torch.arange(queries, device=device)[:, None, None]
    column = torch.arange(width, device=device)
    hidden = column >= row if future else column < row + shift
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def near_tile_queries(window: int, group: int) -> int:
    """Returns the queries of a near tile: few make small matrix products, many compute keys outside the
    window.
    """
    wanted = 64 if window >= 128 else 32
    return max(16, wanted // group)


def near_bands(rows: int, keys: int, window: int, group: int) -> list[NearBand]:
    """Returns bands that cover each query's last ``window`` keys: single tiles while windows grow, then bands of equal
    tiles, about NEAR_SCORES scores of them computed at once, and the rest.
    """
    size, start = near_tile_queries(window, group), keys - rows
    bands, query = [], 0
    while query < rows:
        position = start + query
        whole = (rows - query) // size if position >= window else 0
        if whole:
            width = window + size
            at_once = max(1, min(whole, NEAR_SCORES // (size * group * width)))
            whole = min(whole, BATCHES * at_once)
            bands.append(NearBand(query, size, whole, position - window, width, window, at_once))
            query += whole * size
            continue
        queries, key = min(size, rows - query), max(0, position - window)
        bands.append(NearBand(query, queries, 1, key, position + queries - key, position - key, 1))
        query += queries
    return bands


@dataclass(frozen=True)
class FarTile:
    """Rows ``row ..`` of a block of far rows against the ``index``-th keys, from ``key`` on; the first ``ragged`` rows
    see a part.
    """

    row: int
    index: int
    key: int
    ragged: int


@dataclass(frozen=True)
class FarRows:
    """Rows that see keys far from them, int64 [n], sorted by query: row i sees keys before ``stops[i]``."""

    rows: Tensor
    stops: Tensor

    def __len__(self) -> int:
        return self.rows.shape[0]

    def blocks(self) -> Iterator[FarRows]:
        """Yields these rows, FAR_ROWS at a time."""
        for rows, stops in zip(self.rows.split(FAR_ROWS), self.stops.split(FAR_ROWS), strict=True):
            yield FarRows(rows, stops)

    def keys(self, first_key: int, last_key: int | None) -> slice:
        """Returns the keys that any of the rows sees, from ``first_key`` on and before ``last_key``."""
        limit = int(self.stops[-1]) if len(self) else 0
        limit = limit if last_key is None else min(last_key, limit)
        return slice(first_key, max(first_key, limit))

    def tiles(self, keys: slice, at_once: int) -> list[FarTile]:
        """Returns the tiles of one block over keys, ``at_once`` at a time, each of which a suffix of the rows sees."""
        borders = torch.arange(keys.start, keys.stop, at_once, device=self.stops.device)
        begins = torch.searchsorted(self.stops, borders, right=True).tolist()
        wholes = torch.searchsorted(self.stops, (borders + at_once).clamp_max(keys.stop)).tolist()
        found = zip(begins, borders.tolist(), wholes, strict=True)
        return [FarTile(row, i, key, max(0, whole - row)) for i, (row, key, whole) in enumerate(found)]

    def hide(self, tile: FarTile, scores: Tensor) -> None:
        """Sets scores [rows, keys] of a tile to -inf where a key is not far from its row, in place."""
        if tile.ragged:
            stops = self.stops[tile.row : tile.row + tile.ragged, None]
            keys = torch.arange(tile.key, tile.key + scores.shape[1], device=stops.device)
            scores[: tile.ragged].masked_fill_(keys >= stops, float("-inf"))
