"""RMSNorms that work under sequence and tensor parallelism (Megatron-core's local norms refuse the former)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in fp32 and rounded before the weight, as Hugging Face does.

    Under sequence parallelism every tensor-parallel rank sees other tokens, so the weight's gradient is a partial
    sum. Nobody else adds the parts up here (Megatron-core's ``finalize_model_grads`` is not part of a DeepSpeed
    loop), so the weight passes through the region whose backward all-reduces over the tensor-parallel group.

    Args:
        config: Megatron-core's configuration. With ``layernorm_zero_centered_gamma`` the factor is 1 + weight, in fp32
            and rounded at the end, as Hugging Face's Gemma does.
        hidden_size: width of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.partial_gradient = config.sequence_parallel
        self.zero_centred = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        nn.init.constant_(self.weight, 0.0 if self.zero_centred else 1.0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the normalised states, shape and dtype as given: ``[..., hidden]``."""
        weight = self.weight
        if self.partial_gradient:
            weight = copy_to_tensor_model_parallel_region(weight)
        states = hidden_states.float()
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.zero_centred:
            return (states * (1.0 + weight.float())).to(hidden_states.dtype)
        return weight * states.to(hidden_states.dtype)


class HeadNorm(RMSNorm):
    """RMSNorm of every head with one weight for all heads (queries and keys of Qwen3 and Gemma 3).

    Tensor-parallel ranks hold different heads, so the weight's gradient is a partial sum in every layout.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.partial_gradient = True


class ProjectionNorm(nn.Module):
    """RMSNorm over all heads of a projection at once (OLMo-2), whose heads are spread over tensor-parallel ranks.

    Each rank stores the whole weight and uses the part of its heads, which also covers ranks that hold copies of a
    key head: their gradients, zero elsewhere, are added up like those of any weight with partial gradients.

    Args:
        config: Megatron-core's configuration.
        heads: of the whole model.
        head_dim: width of one head.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.heads = heads
        self.weight = nn.Parameter(torch.ones(heads * head_dim, dtype=config.params_dtype))

    def forward(self, states: Tensor) -> Tensor:
        """Returns the normalised states ``[tokens, 1, local heads, head_dim]``, shape and dtype as given."""
        local, head_dim = states.shape[-2:]
        size, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        copies = local * size // self.heads  # of each head, where there are more ranks than heads
        weight = copy_to_tensor_model_parallel_region(self.weight).view(self.heads, head_dim)
        first = rank // copies * local
        values = states.float()
        squares = values.pow(2).sum((-2, -1), keepdim=True)  # [tokens, 1, 1, 1]
        # each rank's output depends on every rank's sum: summed forward, and its gradient backward
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        values = values * torch.rsqrt(squares / (copies * self.heads * head_dim) + self.eps)
        return weight[first : first + local] * values.to(states.dtype)


class QueryNorm(ProjectionNorm):
    """Norm over all query heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, config.num_attention_heads, hidden_size, eps)


class KeyNorm(ProjectionNorm):
    """Norm over all key heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, config.num_query_groups or config.num_attention_heads, hidden_size, eps)


class NormThenAdd(nn.Module):
    """Normalises a block's output before it joins the residual stream (post-norm, OLMo-2 and Gemma 3).

    It stands where Megatron-core's layer expects its bias-dropout-add, so that the layer itself stays theirs.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Returns the function of (output, bias), residual and dropout probability that Megatron-core calls."""
        add = get_bias_dropout_add(training, fused)

        def normalise_and_add(
            output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
        ) -> Tensor:
            states, bias = output
            return add((self.norm(states if bias is None else states + bias), None), residual, dropout)

        return normalise_and_add
