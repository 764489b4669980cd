"""Torch path for segments of moderate length on a CPU: PyTorch's causal kernel under a mask that the routes make.

For a few hundred tokens the kernel, which computes every score below the diagonal, is quicker than anything that
leaves scores out. The window enters as an additive mask per head, so that one call attends for all rows; a second
call with the routes turned round gives what the router's gradient compares with.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from aha_kernels.call import Activations, Gradients
from aha_kernels.problem import Problem
from aha_kernels.segments import Segment

MODERATE = 400 * 400  # scores per head of a segment up to which leaving scores out costs more than it saves
# Added to a hidden score: finite, because the kernel would make NaN of a block whose scores are all -inf.
_HIDDEN = -1e30


def mask_suits(segment: Segment, device: torch.device) -> bool:
    """Returns whether a segment is short enough, and its queries are its keys, as the kernel's diagonal needs."""
    square = segment.first_position == 0 and segment.num_rows == segment.num_keys
    return device.type == "cpu" and square and segment.num_rows * segment.num_keys <= MODERATE


@lru_cache(maxsize=16)
def _beyond_window(tokens: int, window: int, sinks: int, dtype: torch.dtype) -> Tensor:
    """Returns [tokens, tokens], the mask of a here-row: hidden where a key is neither near nor a sink."""
    position = torch.arange(tokens)
    far = position[None, :] <= position[:, None] - window
    far[:, :sinks] = False
    return torch.zeros(tokens, tokens, dtype=dtype).masked_fill_(far, _HIDDEN)


def _heads(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Returns [tokens, heads or kv_heads, dim] as [1, heads, tokens, dim], keys repeated for their group."""
    return x.to(dtype).repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)[None]


def masked_forward(segment: Activations, problem: Problem) -> None:
    """Writes output and log-sum-exp of the chosen keys; tensors ``[queries, heads, ..]`` of one segment."""
    out, lse = _Masked(segment, problem).attend(segment.opens)
    segment.out.copy_(out)
    segment.lse.copy_(lse)


def masked_backward(segment: Activations, grads: Gradients, problem: Problem) -> None:
    """Writes the gradients of one segment; those of routes where opens or probes is set."""
    work = _Masked(segment, problem)
    d_q, d_k, d_v = work.gradients(grads.out, segment.out, segment.lse)
    kv_heads = segment.k.shape[1]
    grads.q.copy_(d_q)
    grads.k.add_(d_k.unflatten(1, (kv_heads, -1)).sum(2))
    grads.v.add_(d_v.unflatten(1, (kv_heads, -1)).sum(2))
    if grads.route is not None and work.beyond is not None:
        wanted = segment.opens if grads.probes is None else segment.opens | grads.probes
        grads.route.copy_(work.route_gradient(grads.out, segment.out, wanted))


class _Masked:
    """One segment in the kernel's layout."""

    def __init__(self, segment: Activations, problem: Problem) -> None:
        self.opens, self.dtype = segment.opens, segment.lse.dtype
        self.scale = problem.softmax_scale
        tokens, self.num_heads = self.opens.shape
        self.inputs = [_heads(x, self.num_heads, self.dtype) for x in (segment.q, segment.k, segment.v)]
        self.beyond = None
        if problem.window + problem.num_sink_tokens < tokens:  # else no row has a key beyond its window
            self.beyond = _beyond_window(tokens, problem.window, problem.num_sink_tokens, self.dtype)

    def mask(self, opens: Tensor) -> Tensor | None:
        """Returns [1, heads, tokens, tokens] under which rows see all keys where opens is set, else their window."""
        if self.beyond is None or bool(opens.all()):
            return None
        return ((~opens).T[:, :, None] * self.beyond)[None]

    def attend(self, opens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns output ``[tokens, heads, dim]`` and log-sum-exp ``[tokens, heads]`` of routes like opens."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *self.inputs, is_causal=True, attn_mask=self.mask(opens), scale=self.scale
        )
        return out[0].transpose(0, 1), lse[0].T

    def gradients(self, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients ``[tokens, heads, dim]`` of queries and, per query head, of keys and values."""
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads(grad_out, self.num_heads, self.dtype),
            *self.inputs,
            _heads(out, self.num_heads, self.dtype),
            lse.T[None],
            0.0,
            True,
            attn_mask=self.mask(self.opens),
            scale=self.scale,
        )
        return grads[0][0].transpose(0, 1), grads[1][0].transpose(0, 1), grads[2][0].transpose(0, 1)

    def route_gradient(self, grad_out: Tensor, out: Tensor, wanted: Tensor) -> Tensor:
        """Returns ``<dO, O_all - O_here>`` ``[tokens, heads]``, zero where not wanted.

        It is exactly zero in rows without a far key: both calls compute the same there.
        """
        other, _ = self.attend(~self.opens)
        towards_out = (grad_out.to(self.dtype) * (out.to(self.dtype) - other)).sum(-1)
        return torch.where(self.opens, towards_out, -towards_out).masked_fill_(~wanted, 0.0)
