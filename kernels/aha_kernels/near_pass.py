"""The near pass of the torch path: every row against the keys of its window, in bands of equal tiles, and the sinks.

Views of all batches of a band are made at once, outside the loop over them: beside products of a tenth of a
millisecond, making them one by one is a tenth of the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aha_kernels.far_pass import GradientSums, add_far, far_backward, row_products
from aha_kernels.group import LOG2E, Group
from aha_kernels.tiles import NearBand


class _Batch:
    """Memory for the scores of a batch of tiles and for their gradients, which all batches of its size reuse."""

    def __init__(self, work: Group, band: NearBand, tiles: int, backward: bool) -> None:
        self.scores = work.scratch(0, tiles, band.queries * work.group, band.width)
        self.factor, self.edges = work.factor, band.edges(self.scores, work.group, work.window)
        if backward:
            self.d_scores = work.scratch(1, *self.scores.shape)
            self.transposed = list(zip(self.scores.mT.unbind(), self.d_scores.mT.unbind(), strict=True))

    def weights(self, queries: Tensor, keys_t: Tensor, reference: Tensor) -> Tensor:
        """Returns e^(score - reference) [tiles, rows, keys]; queries [tiles, rows, dim], keys_t [tiles, dim, keys],
        reference [tiles, rows, 1].
        """
        torch.baddbmm(reference, queries, keys_t, beta=-LOG2E, alpha=self.factor, out=self.scores)
        for part, hidden in self.edges:
            part.add_(hidden)
        return self.scores.exp2_()


def _batches_of(work: Group, band: NearBand, backward: bool = False) -> dict[int, _Batch]:
    """Returns the memory for each number of tiles that the band computes at once: one, or two with the last rest."""
    sizes = {band.at_once, band.tiles % band.at_once} - {0}
    return {tiles: _Batch(work, band, tiles, backward) for tiles in sizes}


def near_forward(work: Group, out: Tensor, lse: Tensor) -> None:
    """Writes *here* attention of every row to out [rows, dim], its log-sum-exp to lse [rows, 1].

    Both are in the compute dtype, and not finite where scores leave its range.
    """
    own_keys = work.keys[work.num_keys - work.num_queries :, None]
    for band in work.bands:
        memory = _batches_of(work, band)
        rows = (band.rows(x, work.group) for x in (work.queries, out, lse))
        keys_t, values = band.keys(work.keys).mT, band.keys(work.values)
        views = (*rows, band.rows(own_keys, 1), keys_t, values)
        for q, o, total, own, k_t, v in band.batches(*views):
            # The score with the own key: [tiles, queries, group, dim] -> [tiles, rows, 1]
            by_query = q.unflatten(1, (band.queries, work.group))
            products = torch.mul(by_query, own, out=work.scratch(1, *by_query.shape))
            reference = products.sum(-1).view_as(total).mul_(work.softmax_scale)
            weights = memory[len(q)].weights(q, k_t, reference)
            torch.sum(weights, -1, keepdim=True, out=total)
            torch.div(torch.bmm(weights, v, out=work.scratch(1, *q.shape)), total, out=o)
            total.log_().add_(reference)
    add_far(work, work.sink_rows(), 0, work.sinks, out, lse)


def near_backward(work: Group, sums: GradientSums) -> None:
    """Writes sums.queries and sums.near, adds to the others over near keys and sinks."""
    for band in work.bands:
        memory = _batches_of(work, band, backward=True)
        of_rows = (work.queries, sums.d_out, sums.out, sums.lse, sums.queries)
        queries, d_outs, *rows = (band.rows(x, work.group) for x in of_rows)
        of_keys = (work.keys, work.values, sums.keys, sums.values)
        keys, values, d_keys, d_values = (band.keys(x) for x in of_keys)
        score_sums = () if sums.near is None else band.rows(sums.near, work.group).split(band.at_once)
        near = iter(score_sums)
        # Tiles overlap in their keys, so that their sums over rows are a product each.
        tile = zip(*(x.unbind() for x in (queries, d_outs, d_keys, d_values)), strict=True)
        views = (queries, d_outs, *rows, keys, keys.mT, values.mT)
        for q, d_out, out, lse, d_q, k, k_t, v_t in band.batches(*views):
            batch = memory[len(q)]
            delta = row_products(work, d_out, out)  # in the memory that the weights take next
            weights, d_scores = batch.weights(q, k_t, lse), batch.d_scores
            torch.baddbmm(delta, d_out, v_t, beta=-1, out=d_scores).mul_(weights)
            torch.baddbmm(d_q, d_scores, k, beta=0, alpha=work.softmax_scale, out=d_q)
            if sums.near is not None:
                torch.sum(d_scores, -1, keepdim=True, out=next(near))
            for weights_t, d_scores_t in batch.transposed:
                tile_q, tile_d_out, d_k, d_v = next(tile)
                d_v.addmm_(weights_t, tile_d_out)
                d_k.addmm_(d_scores_t, tile_q, alpha=work.softmax_scale)
    far_backward(work, work.sink_rows(), 0, work.sinks, sums, sums.near)
