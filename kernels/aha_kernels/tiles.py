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

FAR_ROWS, FAR_KEYS = 512, 256  # a tile of scores that stays in the second-level cache
NEAR_SCORES = 192 * 1024  # scores of one batch of near tiles, likewise


@dataclass(frozen=True)
class NearTile:
    """``count`` tiles of ``queries`` queries each, the first at ``query``; tile i sees keys ``key + i *
    queries ..``.
    """

    query: int
    queries: int
    count: int
    key: int
    width: int
    position: int  # of the first query

    def mask(self, scores: Tensor, group: int, window: int) -> None:
        """Adds -inf where a key is outside its query's window; scores [count, queries * group, width], in
        place.
        """
        by_query = scores.view(self.count, self.queries, group, self.width)
        first = self.position - self.key  # column of the first query's own key
        right = first + 1
        by_query[..., right:] += _edge(self.queries, self.width - right, 0, True, scores.dtype, scores.device)
        hidden = first - window + 1  # columns before the first query's window
        edge = min(self.width, max(0, hidden) + self.queries - 1)
        if hidden + self.queries - 1 > 0:
            by_query[..., :edge] += _edge(self.queries, edge, hidden, False, scores.dtype, scores.device)


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


def near_tiles(rows: int, keys: int, window: int, group: int) -> Iterator[NearTile]:
    """Yields tiles that cover each query's last ``window`` keys; whole bands of equal tiles as one batch."""
    size, start = near_tile_queries(window, group), keys - rows
    query = 0
    while query < rows:
        position = start + query
        width = window + size
        whole = (rows - query) // size if position >= window else 0
        if whole == 0:
            queries = min(size, rows - query)
            key = max(0, position - window)
            yield NearTile(query, queries, 1, key, position + queries - key, position)
            query += queries
            continue
        count = min(whole, max(1, NEAR_SCORES // (size * group * width)))
        yield NearTile(query, size, count, position - window, width, position)
        query += count * size


@dataclass(frozen=True)
class FarTile:
    """Rows ``row .. row_stop`` of a row list against keys ``key .. key_stop``; the first ``ragged`` rows
    see a part.
    """

    row: int
    row_stop: int
    key: int
    key_stop: int
    ragged: int


class FarRows:
    """Rows that see keys far from them, sorted by query: ``rows`` int64 [n]; row i sees keys before
    ``stops[i]``.
    """

    def __init__(self, rows: Tensor, group: int, rows_in_segment: int, keys: int, window: int) -> None:
        first_stop = keys - rows_in_segment - window + 1
        stops = rows // group + first_stop
        self.rows, self.stops = rows, stops

    def __len__(self) -> int:
        return self.rows.shape[0]

    def tiles(self, first_key: int, last_key: int | None = None) -> Iterator[FarTile]:
        """Yields tiles over keys ``first_key ..``; each block of keys meets a suffix of the sorted rows."""
        if len(self) == 0:
            return
        limit = int(self.stops[-1]) if last_key is None else min(last_key, int(self.stops[-1]))
        if limit <= first_key:
            return
        borders = torch.arange(first_key, limit, FAR_KEYS, device=self.stops.device)
        begins = torch.searchsorted(self.stops, borders, right=True).tolist()
        wholes = torch.searchsorted(self.stops, (borders + FAR_KEYS).clamp_max(limit)).tolist()
        for key, begin, whole in zip(borders.tolist(), begins, wholes, strict=True):
            key_stop = min(key + FAR_KEYS, limit)
            for row in range(begin, len(self), FAR_ROWS):
                row_stop = min(row + FAR_ROWS, len(self))
                yield FarTile(row, row_stop, key, key_stop, max(0, min(whole, row_stop) - row))

    def mask(self, tile: FarTile, scores: Tensor) -> None:
        """Sets scores [rows, keys] of a tile to -inf where a key is not far from its row, in place."""
        if tile.ragged:
            stops = self.stops[tile.row : tile.row + tile.ragged, None]
            keys = torch.arange(tile.key, tile.key_stop, device=stops.device)
            scores[: tile.ragged].masked_fill_(keys >= stops, float("-inf"))
