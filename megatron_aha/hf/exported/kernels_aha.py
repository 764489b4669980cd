"""Attention by routes with the package ``aha_kernels``, where it is installed: work follows the routes."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

KERNELS = "aha_kernels"

# New tokens up to which a step over the cache counts as decoding.
_DECODING = 8


@dataclass
class Span:
    """Which keys exist, for the kernels, which take no masks.

    Args:
        first: place of the first query among the keys.
        keys: keys up to the last query.
        start: first key that exists, ``[batch]``; None when all do.
        end: the key after the last that exists, ``[batch]``; None when all do.
    """

    first: int
    keys: int
    start: Tensor | None = None
    end: Tensor | None = None


def span_of(mask: Tensor | None, query_index: Tensor) -> Span | None:
    """Returns what a causal mask says beside causality, None when it is more than padding at the ends.

    Args:
        mask: bool ``[batch or 1, 1, queries, keys]``, or None for plain causal attention.
        query_index: place of each query among the keys, consecutive, ``[queries]``.
    """
    first, keys = int(query_index[0]), int(query_index[-1]) + 1
    if mask is None:
        return Span(first, keys)
    mask = mask[:, 0]  # [batch or 1, queries, keys]
    key_index = torch.arange(mask.shape[-1], device=mask.device)
    start = mask[:, -1].int().argmax(dim=-1)  # [batch or 1]
    end = start + mask[:, -1].sum(dim=-1)
    near, far = key_index >= start[:, None], key_index < end[:, None]  # [batch or 1, keys]
    expected = (near & far)[:, None] & (key_index <= query_index[:, None])
    # a padding query sees nothing, which some versions of transformers turn into everything
    before = query_index < start[:, None]  # [batch or 1, queries]
    padding = ~mask.any(dim=-1) | (before & mask.all(dim=-1))
    if not bool(((mask == expected) | padding[..., None]).all()):
        return None
    return Span(
        first, keys, start if bool((start > 0).any()) else None, end if bool((end < keys).any()) else None
    )


def attend_by_routes(
    query: Tensor, key: Tensor, value: Tensor, route: Tensor, span: Span, scaling: float, config: Any
) -> Tensor:
    """Returns the attention output ``[batch, queries, heads, head_dim]``.

    Args:
        query: ``[batch, heads, queries, head_dim]``.
        key: ``[batch, groups, keys, head_dim]``; those behind the last query are left out.
        value: like the keys.
        route: 0 and 1, fp32, ``[batch, queries, heads]``, with the gradient of the routes.
        span: as `span_of` returns it.
        scaling: of the scores.
        config: window and sinks.
    """
    kernels = importlib.import_module(KERNELS)
    batch, queries = query.shape[0], query.shape[2]
    given = [states.transpose(1, 2) for states in (query, key, value)]  # [batch, tokens, heads, head_dim]
    options = {"softmax_scale": scaling, "num_sink_tokens": config.aha_num_sink_tokens}
    start, end = (
        None if side is None else side.expand(batch).contiguous() for side in (span.start, span.end)
    )
    if queries <= _DECODING and end is None and not torch.is_grad_enabled():
        lengths = torch.full((batch,), span.keys, dtype=torch.int32, device=query.device)
        return kernels.aha_decode(*given, route > 0.5, config.aha_window, lengths, key_start=start, **options)
    given = [given[0], *(states[:, : span.keys] for states in given[1:])]
    return kernels.aha_attention(
        *given,
        route,
        config.aha_window,
        query_offset=span.first,
        key_start=start,
        key_end=end,
        **options,
    )


def _without_routes(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attention of a layer or a mask that the kernels do not serve: torch's own."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)


def kernels_installed() -> bool:
    """Returns whether the package ``aha_kernels`` can be imported."""
    return importlib.util.find_spec(KERNELS) is not None


if kernels_installed():
    ALL_ATTENTION_FUNCTIONS.register(KERNELS, _without_routes)
    ALL_MASK_ATTENTION_FUNCTIONS.register(KERNELS, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
