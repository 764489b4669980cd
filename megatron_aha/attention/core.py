"""Core attention over packed documents: dense, and All-or-Here."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_aha.attention.packed import PackedBatch
from megatron_aha.config.aha import AHAConfig


class DenseCoreAttention(nn.Module):
    """Full causal attention within each document, by flash-attn where it is installed, else by torch SDPA.

    The baseline of every comparison with AHA. Extra keyword arguments of Megatron-core's builder are accepted.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.use_flash_attn = torch.cuda.is_available() and find_spec("flash_attn") is not None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
        """Returns ``[tokens, heads, head_dim]``, like query; key and value are ``[tokens, groups, head_dim]``."""
        if self.use_flash_attn and query.dtype in (torch.bfloat16, torch.float16):
            from flash_attn import flash_attn_varlen_func

            longest = max(batch.document_lengths)
            return flash_attn_varlen_func(
                query,
                key,
                value,
                batch.cu_seqlens_q,
                batch.cu_seqlens_kv,
                longest,
                longest,
                softmax_scale=self.softmax_scale,
                causal=True,
            )
        lengths = batch.document_lengths
        outputs = []
        for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),  # [1, heads, document tokens, head_dim]
                k.transpose(0, 1).unsqueeze(0),
                v.transpose(0, 1).unsqueeze(0),
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=query.size(1) != key.size(1),
            )
            outputs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outputs)


class AHACoreAttention(nn.Module):
    """Full causal or sliding-window attention per token and head, as the routes say (``aha_kernels``).

    Args:
        config: Megatron-core's configuration.
        aha: window, sinks, router gradient mode and back end.
        layer_number: from 1, over the whole model.
        softmax_scale: of the scores; None means ``head_dim ** -0.5``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        aha: AHAConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.aha = aha
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, route: Tensor, batch: PackedBatch) -> Tensor:
        """Returns ``[tokens, heads, head_dim]``; route is fp32 ``[tokens, heads]`` of 0 (here) and 1 (all)."""
        from aha_kernels import aha_attention

        out = aha_attention(
            query.unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            route.unsqueeze(0),
            self.aha.window,
            cu_seqlens=batch.cu_seqlens_q,
            softmax_scale=self.softmax_scale,
            num_sink_tokens=self.aha.num_sink_tokens,
            router_grad=self.aha.router_grad,
            router_seed=batch.router_seed,
            layer=self.layer_number,
            head_offset=query.size(1) * parallel_state.get_tensor_model_parallel_rank(),
            backend=self.aha.backend,
        )
        return out.squeeze(0)


class WindowCoreAttention(nn.Module):
    """Attention to the last ``window`` keys of each document, for layers that have no router.

    Args:
        config: Megatron-core's configuration.
        window: visible keys, the token itself included.
        backend: of ``aha_kernels``.
        softmax_scale: of the scores; None means ``head_dim ** -0.5``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        window: int,
        backend: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.window = window
        self.backend = backend
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
        """Returns ``[tokens, heads, head_dim]``, like query; key and value are ``[tokens, groups, head_dim]``."""
        from aha_kernels import aha_attention

        out = aha_attention(
            query.unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            query.new_zeros(1, *query.shape[:2], dtype=torch.bool),
            self.window,
            cu_seqlens=batch.cu_seqlens_q,
            softmax_scale=self.softmax_scale,
            router_grad="none",
            backend=self.backend,
        )
        return out.squeeze(0)
