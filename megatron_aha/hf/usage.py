"""Counting what routers decide while a model runs, whoever calls it: generation, evaluation, a harness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class UsageCounter:
    """Counts routes of a model's routers by the position of their tokens, while the ``with`` block is open.

    Padding that an ``attention_mask`` of two dimensions marks is not counted, nor are positions that it shifts.

    Args:
        model: a causal language model of transformers; without routers nothing is counted.
        starts: first position of each bucket of positions, ascending, the first 0; in tokens.

    Attributes:
        layers: number, in the whole model, of each layer with a router.
        real: where the caller knows which tokens of the next pass are no padding at the end, bool
            ``[batch, tokens]``; the model is not told.
    """

    def __init__(self, model: Any, starts: Sequence[int] = (0,)) -> None:
        attentions = [layer.self_attn for layer in getattr(getattr(model, "model", None), "layers", [])]
        self.layers = [
            index for index, each in enumerate(attentions) if getattr(each, "router", None) is not None
        ]
        self._attentions = [attentions[index] for index in self.layers]
        self._model = model
        self._starts = list(starts)
        self._handles: list[Any] = []
        self._mask: Tensor | None = None
        self.real: Tensor | None = None
        # by layer: tokens that chose *all* and tokens, of all tokens and of those with a key beyond their window
        self._open: dict[int, Tensor] = {}
        self._tokens: dict[int, Tensor] = {}
        if self.layers:
            config = model.config
            self._reach = config.aha_window + config.aha_num_sink_tokens

    def __enter__(self) -> UsageCounter:
        if self.layers:
            self._handles.append(self._model.register_forward_pre_hook(self._take_mask, with_kwargs=True))
        for index, attention in enumerate(self._attentions):
            self._handles.append(
                attention.register_forward_hook(
                    lambda _, args, kwargs, output, index=index: self._count(index, kwargs, output[2]),
                    with_kwargs=True,
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def per_router(self, bucket: int | None = None, beyond_window: bool = False) -> Tensor | None:
        """Returns the share of tokens that chose *all*, fp64 ``[layers, routers]``; None where none was counted.

        Args:
            bucket: of positions; None takes all.
            beyond_window: count only tokens that have a key beyond their window.
        """
        if not self._open:
            return None
        chosen = slice(None) if bucket is None else slice(bucket, bucket + 1)
        kind = int(beyond_window)
        opened = torch.stack([self._open[index][kind, chosen].sum(0) for index in sorted(self._open)])
        tokens = torch.stack([self._tokens[index][kind, chosen].sum() for index in sorted(self._tokens)])
        return None if int(tokens[0]) == 0 else opened.double().cpu() / tokens.double().cpu()[:, None]

    def per_layer(self, bucket: int | None = None, beyond_window: bool = False) -> list[float] | None:
        """Returns the mean of ``per_router`` over each layer's routers."""
        usage = self.per_router(bucket, beyond_window)
        return None if usage is None else usage.mean(dim=1).tolist()

    def total(self, bucket: int | None = None, beyond_window: bool = False) -> float | None:
        """Returns the mean of ``per_router`` over layers and routers."""
        usage = self.per_router(bucket, beyond_window)
        return None if usage is None else float(usage.mean())

    def _take_mask(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def _count(self, index: int, kwargs: dict[str, Any], logits: Tensor) -> None:
        batch, queries, routers = logits.shape
        places = kwargs["query_index"].expand(batch, queries)
        real = torch.ones_like(places, dtype=torch.bool)
        if self._mask is not None:
            mask = self._mask.to(places.device)
            places = (mask.long().cumsum(dim=1) - 1).gather(1, places)
            real = mask.bool().gather(1, kwargs["query_index"].expand(batch, queries))
        if self.real is not None:
            real = real & self.real.to(places.device)
        starts = torch.tensor(self._starts, device=places.device)
        buckets = torch.bucketize(places.clamp(min=0), starts, right=True) - 1  # [batch, queries]
        if index not in self._open:
            shape = (2, len(self._starts))
            self._open[index] = torch.zeros(*shape, routers, dtype=torch.int64, device=places.device)
            self._tokens[index] = torch.zeros(shape, dtype=torch.int64, device=places.device)
        routes = (logits > 0).long().flatten(0, 1)  # [batch * queries, routers]
        for kind, counted in enumerate((real, real & (places >= self._reach))):
            weight = counted.flatten().long()
            self._open[index][kind].index_add_(0, buckets.flatten(), routes * weight[:, None])
            self._tokens[index][kind].index_add_(0, buckets.flatten(), weight)
