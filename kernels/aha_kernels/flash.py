"""PyTorch's own causal CPU kernel, for KV groups in which most rows need all keys: nothing is left to
compact.

The operators are those behind ``torch.nn.functional.scaled_dot_product_attention``, which also return and
take the log-sum-exp. Rows of q are [queries, group, dim], keys [keys, dim], with as many queries as keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORTHWHILE = 0.5  # share of a group's rows from which their far keys are cheaper without compaction
_NOWHERE = 1e30  # a log-sum-exp relative to which every weight is zero


def flash_suits(wanted: Tensor, num_keys: int) -> bool:
    """Returns whether so many rows, bool [queries, group], want all keys that compacting them gains
    nothing.
    """
    from_the_start = wanted.shape[0] == num_keys and wanted.device.type == "cpu"
    return from_the_start and float(wanted.float().mean()) >= WORTHWHILE


def _heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [queries, group, dim] as [1, group, queries, dim]."""
    return x.transpose(0, 1)[None].to(dtype)


def _shared(x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Returns keys [keys, dim] as [1, group, keys, dim], a view shared by the group."""
    return x.to(dtype).expand(1, group, *x.shape)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns causal attention of every row [queries, group, dim] and its log-sum-exp [queries, group]."""
    group = q.shape[1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _heads(q, dtype), _shared(k, group, dtype), _shared(v, group, dtype), is_causal=True, scale=scale
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, opens: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients [queries, group, dim], [keys, dim] twice, through the rows where opens is set
    alone.
    """
    group, dtype = q.shape[1], lse.dtype
    open_lse = lse.masked_fill(~opens, _NOWHERE)  # the other rows weigh nothing
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _heads(grad_out, dtype),
        _heads(q, dtype),
        _shared(k, group, dtype),
        _shared(v, group, dtype),
        _heads(out, dtype),
        open_lse.transpose(0, 1)[None],
        dropout_p=0.0,
        is_causal=True,
        scale=scale,
    )
    return grad_q[0].transpose(0, 1), grad_k[0].sum(0), grad_v[0].sum(0)
