"""What the masks of transformers say about *here* and about padding."""

from __future__ import annotations

import torch
from torch import Tensor


def here_mask(
    all_mask: Tensor | None, query_index: Tensor, num_keys: int, window: int, num_sink_tokens: int
) -> Tensor:
    """Returns the mask of *here*, bool ``[batch or 1, 1, queries, keys]``, or additive when `all_mask` is.

    Args:
        all_mask: the mask of *all*: bool, additive, or None for plain causal attention.
        query_index: place of each query among the keys, ``[queries]``.
        num_keys: keys, those of the cache included.
        window: keys seen, the token itself included.
        num_sink_tokens: first visible keys of each query that are seen too.
    """
    key_index = torch.arange(num_keys, device=query_index.device)
    query_index = query_index[:, None]
    near = key_index > query_index - window  # [queries, keys]
    if all_mask is None:
        visible = (key_index <= query_index)[None, None]
    else:
        all_mask = all_mask[..., :num_keys]
        visible = all_mask if all_mask.dtype == torch.bool else all_mask > torch.finfo(all_mask.dtype).min / 2
    if num_sink_tokens > 0:
        first = visible.int().argmax(dim=-1, keepdim=True)  # [batch or 1, 1, queries, 1]
        near = near | (key_index < first + num_sink_tokens)
    if all_mask is None or all_mask.dtype == torch.bool:
        return visible & near
    return all_mask.masked_fill(~near, torch.finfo(all_mask.dtype).min)


def real_tokens(attention_mask: Tensor | None, hidden_states: Tensor, query_index: Tensor) -> Tensor:
    """Returns which queries are real tokens and not padding, bool ``[batch, queries]``."""
    batch, queries, _ = hidden_states.shape
    if attention_mask is None:
        return torch.ones(batch, queries, dtype=torch.bool, device=hidden_states.device)
    if attention_mask.dim() == 2:
        return attention_mask[:, -queries:].bool()
    # In a prepared mask a real token sees itself.
    mine = query_index[None, None, :, None].expand(attention_mask.shape[0], 1, -1, 1)
    seen = attention_mask.gather(-1, mine)[:, 0, :, 0]  # [batch or 1, queries]
    visible = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
    return visible.expand(batch, -1)
