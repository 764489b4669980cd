"""RMSNorm that works under sequence parallelism (Megatron-core's local norms refuse it)."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in fp32 and rounded before the weight, as Hugging Face does.

    Under sequence parallelism every tensor-parallel rank sees other tokens, so the weight's gradient is a partial
    sum. Nobody else adds the parts up here (Megatron-core's ``finalize_model_grads`` is not part of a DeepSpeed
    loop), so the weight passes through the region whose backward all-reduces over the tensor-parallel group.

    Args:
        config: Megatron-core's configuration; only ``sequence_parallel`` is read.
        hidden_size: width of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the normalised states, shape and dtype as given: ``[..., hidden]``."""
        weight = self.weight
        if self.sequence_parallel:
            weight = copy_to_tensor_model_parallel_region(weight)
        states = hidden_states.float()
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)
        return weight * states.to(hidden_states.dtype)
