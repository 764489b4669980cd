"""The router: one logit per token and head, decided into *all* (1) or *here* (0)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    all_to_all_sp2hp,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_aha.config.aha import AHAConfig


def router_count(aha: AHAConfig, num_attention_heads: int, num_query_groups: int) -> int:
    """Returns the routers of one layer: one per query head, or one per key/value head."""
    return num_attention_heads if aha.granularity == "head" else num_query_groups


class AHARouter(nn.Module):
    """Computes the router logits of this rank's heads (arXiv 2512.22562).

    The weight is stored sharded by heads, in the order of the query heads. Logits are computed in fp32 from the
    stored weight whatever the model's precision, since a comparison with 0 in bf16 decides differently.

    Args:
        config: Megatron-core's configuration.
        aha: bias, its initial value and the granularity.
    """

    def __init__(self, config: TransformerConfig, aha: AHAConfig) -> None:
        super().__init__()
        world_size = parallel_state.get_tensor_model_parallel_world_size()
        groups = config.num_query_groups or config.num_attention_heads
        self.num_routers = router_count(aha, config.num_attention_heads, groups)
        self.num_local_routers = self.num_routers // world_size
        self.first_router = self.num_local_routers * parallel_state.get_tensor_model_parallel_rank()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(
            torch.zeros(self.num_local_routers, config.hidden_size, dtype=config.params_dtype)
        )
        self.bias: nn.Parameter | None = None
        if aha.bias:
            self.bias = nn.Parameter(
                torch.full((self.num_local_routers,), aha.init_bias, dtype=config.params_dtype)
            )
        for parameter in self.parameters():
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the logits of this rank's routers for all tokens, fp32 ``[tokens, local routers]``.

        Args:
            hidden_states: what the query projection receives, ``[tokens, 1, hidden]``; under sequence parallelism
                only this rank's share of the tokens.

        Under sequence parallelism the weight is gathered (routers x hidden, tiny) rather than the hidden states a
        second time; the logits of local tokens for all heads are then exchanged for those of all tokens for local
        heads.
        """
        states = hidden_states.flatten(0, 1)  # [tokens or local tokens, hidden]
        if self.sequence_parallel:
            weight = gather_from_sequence_parallel_region(self.weight)  # [routers, hidden]
            logits = F.linear(states.float(), weight.float())
            logits = all_to_all_sp2hp(logits)  # [tokens, local routers]
        else:
            states = copy_to_tensor_model_parallel_region(states)
            logits = F.linear(states.float(), self.weight.float())
        if self.bias is not None:
            logits = logits + self.bias.float()
        return logits


class DecideRoutes(torch.autograd.Function):
    """Hard routes forward, straight-through gradient backward, with the router loss's gradient added.

    Forward is ``logit > 0``. Backward passes ``dL/droute`` to ``p = sigmoid(logit)`` (straight-through estimator)
    and adds the derivative of the router loss, ``router_loss_weight`` for every token that carries loss. Adding it
    here, where ``p`` lives, makes the loss independent of pipeline stage and recompute.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, decided: Tensor, loss_mask: Tensor, router_loss_weight: float
    ) -> Tensor:
        """Returns the routes as fp32 0 and 1 ``[tokens, routers]``; ``decided`` holds them as bool."""
        ctx.save_for_backward(logits, loss_mask)
        ctx.router_loss_weight = router_loss_weight
        return decided.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad_route: Tensor) -> tuple[Tensor | None, ...]:
        """Returns dL/dlogits ``[tokens, routers]``."""
        logits, loss_mask = ctx.saved_tensors
        slope = logits.sigmoid() * (-logits).sigmoid()  # sigmoid'(z), without cancellation where p is near 1
        grad_probability = grad_route + ctx.router_loss_weight * loss_mask.unsqueeze(-1)
        return grad_probability * slope, None, None, None
