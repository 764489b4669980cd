"""The far pass of the torch path: compacted rows against the keys beyond their window, a block of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aha_kernels.group import LOG2E, Group, all_finite
from aha_kernels.tiles import FAR_KEYS, FarRows, FarTile


def _far_weights(
    work: Group, rows: FarRows, tile: FarTile, queries: Tensor, keys: Tensor, lse: Tensor
) -> Tensor:
    """Returns e^(score - lse) [rows, keys] of a tile; queries [rows, dim], its keys, lse [rows, 1]."""
    scores = work.scratch(0, queries.shape[0], keys.shape[0])
    torch.addmm(lse, queries, keys.T, beta=-LOG2E, alpha=work.factor, out=scores)
    rows.hide(tile, scores)
    return scores.exp2_()


def _far_sums(
    work: Group, rows: FarRows, lse: Tensor, first_key: int, last_key: int | None
) -> tuple[Tensor, Tensor]:
    """Returns the sums of weight * value [rows, dim] and of weights [rows, 1] over the far keys of one block of rows.

    Weights are relative to the keys whose log-sum-exp is lse [rows, 1]. Takes the buffers 0, 2 and 3.
    """
    queries = work.taken(work.queries, rows.rows, 2)
    sums, totals = work.scratch(3, *queries.shape).zero_(), torch.zeros_like(lse)
    seen = rows.keys(first_key, last_key)
    keys, values = work.keys[seen].split(FAR_KEYS), work.values[seen].split(FAR_KEYS)
    for tile in rows.tiles(seen, FAR_KEYS):
        at = slice(tile.row, None)
        weights = _far_weights(work, rows, tile, queries[at], keys[tile.index], lse[at])
        sums[at].addmm_(weights, values[tile.index])
        totals[at] += weights.sum(-1, keepdim=True)
    return sums, totals


def add_far(
    work: Group, rows: FarRows, first_key: int, last_key: int | None, out: Tensor, lse: Tensor
) -> None:
    """Lets the rows see far keys too: updates their output in out [all rows, dim] and lse [all rows, 1]."""
    for block in rows.blocks():
        at = block.rows
        sums, totals = _far_sums(work, block, lse[at], first_key, last_key)
        out[at] = sums.add_(work.taken(out, at, 0)).div_(1 + totals)
        lse[at] += totals.log1p_()


@dataclass(frozen=True)
class GradientSums:
    """What the backward passes of one segment and KV group read, write and add to.

    Args:
        d_out, out: gradient of the output, and the output [rows, dim].
        lse: log-sum-exp [rows, 1] of the keys that a row saw; infinite for rows to leave out.
        queries: gradient [rows, dim]; the near pass writes it, the far pass adds to it.
        keys, values: gradients [keys, dim], added to.
        near: sums of the score gradients over each row's near keys and sinks [rows, 1]; None if not wanted.
    """

    d_out: Tensor
    out: Tensor
    lse: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    near: Tensor | None


def far_backward(
    work: Group,
    rows: FarRows,
    first_key: int,
    last_key: int | None,
    sums: GradientSums,
    score_sums: Tensor | None = None,
) -> None:
    """Adds the rows' part over far keys to the gradients, and sums of score gradients to score_sums [all rows,
    1]."""
    for block in rows.blocks():
        _block_backward(work, block, first_key, last_key, sums, score_sums)


def _block_backward(
    work: Group,
    block: FarRows,
    first_key: int,
    last_key: int | None,
    sums: GradientSums,
    score_sums: Tensor | None,
) -> None:
    rows = block.rows
    queries, d_out, lse = work.taken(work.queries, rows, 2), work.taken(sums.d_out, rows, 3), sums.lse[rows]
    delta = row_products(work, d_out, work.taken(sums.out, rows, 0))
    d_queries, totals = work.taken(sums.queries, rows, 4), torch.zeros_like(lse)
    seen = block.keys(first_key, last_key)
    of_keys = (work.keys, work.values, sums.keys, sums.values)
    pieces = list(zip(*(x[seen].split(FAR_KEYS) for x in of_keys), strict=True))
    for tile in block.tiles(seen, FAR_KEYS):
        at, (k, v, d_k, d_v) = slice(tile.row, None), pieces[tile.index]
        q, d_o = queries[at], d_out[at]
        weights = _far_weights(work, block, tile, q, k, lse[at])
        d_v.addmm_(weights.T, d_o)
        d_scores = work.scratch(1, *weights.shape)
        torch.addmm(delta[at], d_o, v.T, beta=-1, out=d_scores).mul_(weights)
        d_k.addmm_(d_scores.T, q, alpha=work.softmax_scale)
        d_queries[at].addmm_(d_scores, k, alpha=work.softmax_scale)
        if score_sums is not None:
            totals[at] += d_scores.sum(-1, keepdim=True)
    sums.queries[rows] = d_queries
    if score_sums is not None:
        score_sums[rows] += totals


def probe_rows(work: Group, probes: Tensor, d_out: Tensor, out: Tensor, lse: Tensor, d_route: Tensor) -> bool:
    """Writes ``<dO, O_all - O_here>`` of the here-rows in probes, bool [queries, group], to d_route [all rows, 1];
    returns False out of range.
    """
    finite = True
    for block in work.far_rows(probes).blocks():
        rows = block.rows
        sums, totals = _far_sums(work, block, lse[rows], work.sinks, None)
        finite = finite and all_finite(sums, totals)
        row_d_out = work.taken(d_out, rows, 4)
        delta = row_products(work, row_d_out, work.taken(out, rows, 0))
        # sums is weight * O_far relative to the near weight 1
        d_route[rows] = (row_products(work, sums, row_d_out) - totals * delta) / (1 + totals)
    return finite


def row_products(work: Group, a: Tensor, b: Tensor) -> Tensor:
    """Returns the scalar products of rows [.., dim]: [.., 1]; a and b are one tile's at most."""
    return torch.sum(torch.mul(a, b, out=work.scratch(0, *a.shape)), -1, keepdim=True)
