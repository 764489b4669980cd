"""Sums of router probabilities and routes, per layer and head, over one step of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Columns of the table of sums.
_PROBABILITY, _OPEN, _TOKENS, _OPEN_BEYOND, _TOKENS_BEYOND = range(5)


@dataclass
class RouterStatistics:
    """What the routers did over a step, over all ranks.

    Attributes:
        router_loss: mean of ``p = sigmoid(logit)`` over tokens that carry loss, heads and layers.
        usage: mean of the hard routes over the same.
        usage_beyond_window: the same over tokens that have a key beyond their window; 0 when there is none.
        usage_per_head: mean of the hard routes, fp64 ``[layers, routers]``.
        usage_beyond_window_per_head: the same over tokens with a key beyond their window.
    """

    router_loss: float
    usage: float
    usage_beyond_window: float
    usage_per_head: Tensor
    usage_beyond_window_per_head: Tensor


class UsageTracker:
    """Adds up, without host synchronisation, what each layer's router did.

    Every rank writes only the layers and heads it owns and the tokens it sees, so one sum over all ranks yields the
    whole, whatever the layout.

    Args:
        num_layers: layers of the whole model.
        num_routers: routers per layer of the whole model.
        device: where the layers run.
    """

    def __init__(self, num_layers: int, num_routers: int, device: torch.device) -> None:
        self.sums = torch.zeros(num_layers, num_routers, 5, dtype=torch.float64, device=device)

    def record(
        self,
        layer_number: int,
        first_router: int,
        logits: Tensor,
        route: Tensor,
        counted: Tensor,
        beyond: Tensor,
    ) -> None:
        """Adds one micro-batch of one layer.

        Args:
            layer_number: from 1, over the whole model, as Megatron-core counts.
            first_router: index of this rank's first router.
            logits: fp32 ``[tokens, local routers]``.
            route: the decided routes, bool ``[tokens, local routers]``.
            counted: 1 for tokens that carry loss, ``[tokens]``.
            beyond: whether a token has a key beyond its window, bool ``[tokens]``.
        """
        with torch.no_grad():
            weight = counted.double().unsqueeze(-1)  # [tokens, 1]
            weight_beyond = weight * beyond.unsqueeze(-1)
            opened = route.double()
            mine = self.sums[layer_number - 1, first_router : first_router + logits.size(-1)]
            mine[:, _PROBABILITY] += (logits.double().sigmoid() * weight).sum(0)
            mine[:, _OPEN] += (opened * weight).sum(0)
            mine[:, _TOKENS] += weight.sum(0)
            mine[:, _OPEN_BEYOND] += (opened * weight_beyond).sum(0)
            mine[:, _TOKENS_BEYOND] += weight_beyond.sum(0)

    def reduce(self) -> RouterStatistics:
        """Sums over all ranks (a collective) and returns the means; the tracker starts again from zero."""
        sums = self.sums.clone()
        self.sums.zero_()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        sums = sums.cpu()
        total = sums.sum((0, 1))

        def mean(value: Tensor, count: Tensor) -> Tensor:
            return value / count.clamp(min=1)

        return RouterStatistics(
            router_loss=float(mean(total[_PROBABILITY], total[_TOKENS])),
            usage=float(mean(total[_OPEN], total[_TOKENS])),
            usage_beyond_window=float(mean(total[_OPEN_BEYOND], total[_TOKENS_BEYOND])),
            usage_per_head=mean(sums[..., _OPEN], sums[..., _TOKENS]),
            usage_beyond_window_per_head=mean(sums[..., _OPEN_BEYOND], sums[..., _TOKENS_BEYOND]),
        )
