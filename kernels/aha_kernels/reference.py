"""The definition of All-or-Here attention, written to be read: the oracle of every test.

``O = route * O_all + (1 - route) * O_here``: *all* is causal attention, *here* is causal attention over the
last ``window`` keys, the token itself included. Autograd through this blend is the straight-through
estimator of arXiv 2512.22562: ``dL/droute = <dL/dO, O_all - O_here>``, while q, k and v get gradients
through the chosen branch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_keys(
    batch: int,
    num_queries: int,
    num_keys: int,
    window: int,
    *,
    query_offset: int | Tensor = 0,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_sink_tokens: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns two bool masks [batch, queries, keys]: the keys that *all* sees and the keys that *here*
    sees.
    """
    offset = torch.as_tensor(query_offset).cpu().expand(batch)
    first = torch.zeros(batch, dtype=torch.long) if key_start is None else key_start.cpu().long()
    stop = torch.full((batch,), num_keys) if key_end is None else key_end.cpu().long()

    position = (offset[:, None] + torch.arange(num_queries))[:, :, None]  # [batch, queries, 1]
    key = torch.arange(num_keys).expand(batch, 1, num_keys)
    first = first[:, None, None].expand(batch, num_queries, 1)
    if cu_seqlens is not None:  # a document is everything from its border to the next
        borders = cu_seqlens.cpu().long()
        document = torch.searchsorted(borders, position.contiguous(), right=True) - 1
        first = borders[document]

    everything = (key >= first) & (key < stop[:, None, None]) & (key <= position)
    near = key > position - window
    sink = key < first + num_sink_tokens
    return everything, everything & (near | sink)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softmax_scale: float) -> Tensor:
    """Returns softmax attention of q [B, Tq, H, D] over the visible [B, Tq, Tk] keys; a row without keys is
    zero.
    """
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    empty = ~visible.any(-1)[:, None, :, None]
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    route: Tensor,
    window: int,
    *,
    query_offset: int | Tensor = 0,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    num_sink_tokens: int = 0,
    route_grad_weight: Tensor | None = None,
) -> Tensor:
    """Returns the output [batch, queries, heads, head_dim] by the definition, differentiable, in the dtype
    of q.

    Arguments are those of :func:`aha_kernels.aha_attention`. ``route_grad_weight`` [batch, queries, heads]
    scales each route's gradient (sampled router gradients); the output does not depend on it.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, group_size = k.shape[1], num_heads // k.shape[2]
    k, v = (x.repeat_interleave(group_size, dim=2) for x in (k, v))
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    everything, here = visible_keys(
        batch,
        num_queries,
        num_keys,
        window,
        query_offset=query_offset,
        key_start=key_start,
        key_end=key_end,
        cu_seqlens=cu_seqlens,
        num_sink_tokens=num_sink_tokens,
    )
    out_all = masked_attention(q, k, v, everything.to(q.device), scale)
    out_here = masked_attention(q, k, v, here.to(q.device), scale)
    route = route.to(q.dtype)
    if route_grad_weight is not None:
        route = route.detach() + (route - route.detach()) * route_grad_weight
    return route[..., None] * out_all + (1 - route[..., None]) * out_here
