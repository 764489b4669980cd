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
from megatron_aha.attention.pieces import Piece
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
        """Returns ``[tokens, heads, head_dim]``, like query; key and value are ``[tokens, groups, head_dim]``.

        Under context parallelism query holds this rank's tokens, key and value those of the whole row.
        """
        return _joined(
            [
                self._attend(query[piece.rows], key[piece.keys], value[piece.keys], piece)
                for piece in batch.pieces
            ]
        )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, piece: Piece) -> Tensor:
        if self.use_flash_attn and query.dtype in (torch.bfloat16, torch.float16):
            from flash_attn import flash_attn_varlen_func

            # With more keys than queries its causal mask counts from the end, as a query offset does.
            ends = query.new_tensor([[0, query.size(0)], [0, key.size(0)]], dtype=torch.int32)
            queries, keys = (
                ends.unbind() if piece.cu_seqlens is None else (piece.cu_seqlens, piece.cu_seqlens)
            )
            longest = max(piece.lengths)
            return flash_attn_varlen_func(
                query,
                key,
                value,
                queries,
                keys,
                longest,
                longest + piece.query_offset,
                softmax_scale=self.softmax_scale,
                causal=True,
            )
        outputs = []
        key_lengths = [length + piece.query_offset for length in piece.lengths]
        for q, k, v in zip(
            query.split(piece.lengths), key.split(key_lengths), value.split(key_lengths), strict=True
        ):
            mask = None
            if piece.query_offset:
                mask = torch.ones(q.size(0), k.size(0), dtype=torch.bool, device=q.device).tril(
                    piece.query_offset
                )
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),  # [1, heads, document tokens, head_dim]
                k.transpose(0, 1).unsqueeze(0),
                v.transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.softmax_scale,
                enable_gqa=query.size(1) != key.size(1),
            )
            outputs.append(out.squeeze(0).transpose(0, 1))
        return _joined(outputs)


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
        """Returns ``[tokens, heads, head_dim]``; route is fp32 ``[tokens, heads]`` of 0 (here) and 1 (all).

        Under context parallelism query and route hold this rank's tokens, key and value those of the whole row.
        """
        return _joined(
            [
                self._attend(
                    query[piece.rows], key[piece.keys], value[piece.keys], route[piece.rows], piece, batch
                )
                for piece in batch.pieces
            ]
        )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, route: Tensor, piece: Piece, batch: PackedBatch
    ) -> Tensor:
        return _by_kernel(
            query,
            key,
            value,
            route,
            piece,
            window=self.aha.window,
            softmax_scale=self.softmax_scale,
            num_sink_tokens=self.aha.num_sink_tokens,
            router_grad=self.aha.router_grad,
            router_seed=batch.router_seed[piece.rows],
            layer=self.layer_number,
            head_offset=query.size(1) * parallel_state.get_tensor_model_parallel_rank(),
            backend=self.aha.backend,
        )


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
        """Returns ``[tokens, heads, head_dim]``, like query; key and value are ``[tokens, groups, head_dim]``.

        Under context parallelism query holds this rank's tokens, key and value those of the whole row.
        """
        here = query.new_zeros(query.shape[:2], dtype=torch.bool)
        return _joined(
            [
                _by_kernel(
                    query[piece.rows],
                    key[piece.keys],
                    value[piece.keys],
                    here[piece.rows],
                    piece,
                    window=self.window,
                    softmax_scale=self.softmax_scale,
                    router_grad="none",
                    backend=self.backend,
                )
                for piece in batch.pieces
            ]
        )


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, route: Tensor, piece: Piece, *, window: int, **options: Any
) -> Tensor:
    """Returns ``[tokens, heads, head_dim]`` of one piece, by ``aha_kernels``."""
    from aha_kernels import aha_attention

    out = aha_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        route.unsqueeze(0),
        window,
        query_offset=piece.query_offset,
        cu_seqlens=piece.cu_seqlens,
        **options,
    )
    return out.squeeze(0)


def _joined(parts: list[Tensor]) -> Tensor:
    """Returns the parts one below the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
