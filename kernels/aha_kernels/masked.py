"""Torch path for segments of moderate length on a CPU: PyTorch's causal kernel under a mask that the routes make.

For a few hundred tokens the kernel, which computes every score below the diagonal, is quicker than anything that
leaves scores out. The window enters as an additive mask per head, so that one call attends for all rows; a second
call with the routes turned round gives what the router's gradient compares with.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

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


class MaskedSegment:
    """The tensors of one segment in the kernel's layout.

    Args:
        q: ``[tokens, heads, dim]``.
        k: ``[tokens, kv_heads, dim]``.
        v: like k.
        opens: bool ``[tokens, heads]``.
        problem: window, sinks and softmax scale.
        dtype: of scores and sums.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, opens: Tensor, problem: Problem, dtype: torch.dtype
    ) -> None:
        self.tokens, self.num_heads = opens.shape
        self.dtype = dtype
        self.scale = problem.softmax_scale
        self.inputs = [_heads(x, self.num_heads, dtype) for x in (q, k, v)]
        self.opens = opens
        self.beyond = None
        if problem.window + problem.num_sink_tokens < self.tokens:  # else no row has a key beyond its window
            self.beyond = _beyond_window(self.tokens, problem.window, problem.num_sink_tokens, dtype)

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
