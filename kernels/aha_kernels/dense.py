"""Torch path for short segments and for scores of extreme range: blocks of rows against all their keys.

All heads of a segment are computed at once; a block holds at most ``SCORES_PER_BLOCK`` scores per head, so
that memory stays bounded for any length. Heads of one KV group are stacked as rows: ``[kv_heads, group *
rows, keys]``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from aha_kernels.call import Activations, Gradients
from aha_kernels.problem import Problem, compute_dtype
from aha_kernels.segments import Segment

SCORES_PER_BLOCK = 512 * 512


class Block:
    """One block of consecutive queries of a segment: which keys they see, and views of their tensors."""

    def __init__(
        self, segment: Segment, problem: Problem, first: int, stop: int, device: torch.device
    ) -> None:
        self.batch = segment.batch
        self.rows = slice(segment.row_start + first, segment.row_start + stop)
        position = segment.first_position + torch.arange(first, stop, device=device)[:, None]
        num_keys = min(segment.num_keys, segment.first_position + stop)
        self.keys = slice(segment.key_start, segment.key_start + num_keys)
        key = torch.arange(num_keys, device=device)
        self.everything = key <= position  # [rows, keys]
        near = (key > position - problem.window) | (key < problem.num_sink_tokens)
        self.here = self.everything & near
        self.has_far = segment.first_position + stop > problem.window + problem.num_sink_tokens

    def query_heads(self, x: Tensor, kv_heads: int) -> Tensor:
        """Returns the block's rows of x [batch, queries, heads, dim] as [kv_heads, group * rows, dim]."""
        x = x[self.batch, self.rows]
        rows, heads, dim = x.shape
        grouped = x.reshape(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        return grouped.reshape(kv_heads, heads // kv_heads * rows, dim).to(compute_dtype(x.dtype))

    def key_heads(self, x: Tensor) -> Tensor:
        """Returns the block's keys of x [batch, keys, kv_heads, dim] as [kv_heads, keys, dim]."""
        return x[self.batch, self.keys].transpose(0, 1).to(compute_dtype(x.dtype))

    def store_query_heads(self, target: Tensor, value: Tensor) -> None:
        """Writes value [kv_heads, group * rows, dim] to the block's rows of target [batch, queries, heads,
        dim].
        """
        rows, heads, dim = target[self.batch, self.rows].shape
        kv_heads = value.shape[0]
        value = value.view(kv_heads, heads // kv_heads, rows, dim).permute(2, 0, 1, 3)
        target[self.batch, self.rows] = value.reshape(rows, heads, dim).to(target.dtype)


def _blocks(segment: Segment, problem: Problem, device: torch.device) -> Iterator[Block]:
    """Yields the blocks of a segment."""
    rows = max(1, min(segment.num_rows, SCORES_PER_BLOCK // segment.num_keys))
    for first in range(0, segment.num_rows, rows):
        yield Block(segment, problem, first, min(first + rows, segment.num_rows), device)


def _visible_scores(scores: Tensor, visible: Tensor) -> Tensor:
    """Returns scores [kv_heads, group * rows, keys], -inf where visible (broadcast [.., rows, keys]) is
    false.
    """
    kv_heads, stacked, keys = scores.shape
    rows = visible.shape[-2]
    by_row = scores.view(kv_heads, stacked // rows, rows, keys)
    return by_row.masked_fill(~visible, float("-inf")).view(kv_heads, stacked, keys)


def _probabilities(masked_scores: Tensor, lse: Tensor) -> Tensor:
    """Returns exp(masked_scores - lse [.., 1]); zero in rows without keys, whose lse is -inf."""
    return (masked_scores - lse.masked_fill(lse == float("-inf"), 0.0)).exp_()


def _route_gradient(block: Block, scores: Tensor, centred: Tensor, delta: Tensor) -> Tensor:
    """Returns ``<dO, O_all - O_here>`` [kv_heads, group * rows, 1]; centred is ``dO V^T - delta``, delta
    ``<dO, O>``.
    """
    kv_heads, stacked, _ = scores.shape
    empty = ~block.here.any(-1).repeat(stacked // block.here.shape[0])[:, None]  # rows beyond the last key
    difference = torch.softmax(_visible_scores(scores, block.everything), -1)
    difference -= torch.softmax(_visible_scores(scores, block.here), -1).masked_fill_(empty, 0.0)
    # Both weights sum to one, so centring changes nothing but the rounding, except where *here* sees nothing.
    return difference.mul_(centred).sum(-1, keepdim=True) + delta * empty


def dense_forward(call: Activations, problem: Problem, segment: Segment) -> None:
    """Writes output, log-sum-exp of the chosen keys and of the near keys for the rows of one segment."""
    kv_heads = call.k.shape[2]
    for block in _blocks(segment, problem, call.q.device):
        keys = block.key_heads(call.k) * problem.softmax_scale
        scores = block.query_heads(call.q, kv_heads) @ keys.transpose(1, 2)
        near = _visible_scores(scores, block.here)
        near_lse = near.logsumexp(-1, keepdim=True)
        chosen, chosen_lse = near, near_lse
        if block.has_far:
            route = block.query_heads(call.route[..., None], kv_heads).bool()
            visible = block.here | (block.everything & route.view(kv_heads, -1, block.here.shape[0], 1))
            chosen = _visible_scores(scores, visible)
            chosen_lse = chosen.logsumexp(-1, keepdim=True)
        result = _probabilities(chosen, chosen_lse) @ block.key_heads(call.v)
        block.store_query_heads(call.out, result)
        block.store_query_heads(call.lse[..., None], chosen_lse)
        if call.lse_here is not None:
            block.store_query_heads(call.lse_here[..., None], near_lse)


def dense_backward(call: Activations, grads: Gradients, problem: Problem, segment: Segment) -> None:
    """Writes the gradients of one segment; those of routes where opens or probes is set."""
    kv_heads, scale = call.k.shape[2], problem.softmax_scale
    for block in _blocks(segment, problem, call.q.device):
        rows = block.here.shape[0]
        queries, keys = block.query_heads(call.q, kv_heads) * scale, block.key_heads(call.k)
        d_out, values = block.query_heads(grads.out, kv_heads), block.key_heads(call.v)
        delta = (d_out * block.query_heads(call.out, kv_heads)).sum(-1, keepdim=True)
        scores = queries @ keys.transpose(1, 2)
        centred = (d_out @ values.transpose(1, 2)).sub_(delta)

        route = block.query_heads(call.route[..., None], kv_heads).bool().view(kv_heads, -1, rows, 1)
        visible = block.here | (block.everything & route)
        weights = _probabilities(
            _visible_scores(scores, visible), block.query_heads(call.lse[..., None], kv_heads)
        )
        grads.v[block.batch, block.keys] += (weights.transpose(1, 2) @ d_out).transpose(0, 1)
        weights.mul_(centred)
        grads.k[block.batch, block.keys] += (weights.transpose(1, 2) @ queries).transpose(0, 1)
        block.store_query_heads(grads.q, (weights @ keys).mul_(scale))

        if grads.route is not None and block.has_far:
            value = _route_gradient(block, scores, centred, delta)
            wanted = route
            if grads.probes is not None:
                probes = block.query_heads(grads.probes[..., None], kv_heads).bool()
                wanted = wanted | probes.view(kv_heads, -1, rows, 1)
            value = value.view(kv_heads, -1, rows, 1).masked_fill_(~wanted, 0.0)
            block.store_query_heads(grads.route[..., None], value.view(kv_heads, -1, 1))
