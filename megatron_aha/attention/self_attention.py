"""Megatron-core self-attention over packed documents, plain and with the All-or-Here router."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron_aha.attention.packed import PackedBatch
from megatron_aha.attention.rope import angles_at
from megatron_aha.attention.router import AHARouter, DecideRoutes
from megatron_aha.config.aha import AHAConfig
from megatron_aha.errors import UserError


class PackedSelfAttention(SelfAttention):
    """Megatron-core's projections around our core attention; rotary positions come with the batch.

    Training only: Megatron-core's inference contexts bypass the core attention and are refused.

    Args:
        frequencies: rotary frequencies of this layer's own, fp32 ``[head_dim / 2]``; None takes the model's.
        rotation_scale: factor on rotated queries and keys.
    """

    def __init__(
        self, *args: Any, frequencies: Tensor | None = None, rotation_scale: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.frequencies = frequencies
        self.rotation_scale = rotation_scale

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedBatch | None = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the attention output ``[tokens, 1, hidden]`` (a share of the tokens under SP) and its bias.

        Args:
            hidden_states: ``[tokens, 1, hidden]``, a share of the tokens under sequence parallelism.
            attention_mask: unused; document borders come with the batch.
            rotary_pos_emb: table of angles ``[positions, 1, 1, head_dim]``.
            packed_seq_params: the micro-batch.
            inference_context: must be None.
        """
        if inference_context is not None:
            raise UserError(
                "Megatron-core's inference contexts bypass the router; export with tools/convert_to_hf.py to generate"
            )
        if packed_seq_params is None or rotary_pos_emb is None:
            raise ValueError("PackedSelfAttention needs packed_seq_params and rotary_pos_emb")
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        positions = packed_seq_params.position_ids
        own = self.frequencies
        angles = rotary_pos_emb[positions] if own is None else angles_at(positions, own)
        # [tokens, 1, 1, head_dim]

        def rotate(states: Tensor) -> Tensor:
            rotated = apply_rotary_pos_emb(states, angles, config=self.config, mscale=self.rotation_scale)
            return rotated.squeeze(1)  # [tokens, local heads or groups, head_dim]

        query, key = rotate(query), rotate(key)
        value = value.squeeze(1)
        if packed_seq_params.share is not None:
            # In one collective; outside the core attention, so that selective recompute does not gather again.
            both = packed_seq_params.share.gather(torch.stack([key, value], dim=1))
            key, value = both.unbind(1)  # [all tokens of the row, local groups, head_dim]
        context = self.attend(hidden_states, query, key, value, packed_seq_params)
        return self.linear_proj(
            context.reshape(context.size(0), 1, -1)
        )  # [tokens, 1, local heads * head_dim]

    def attend(
        self, hidden_states: Tensor, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch
    ) -> Tensor:
        """Returns ``[tokens, local heads, head_dim]``; the place where an attention variant differs."""
        return self.run_core_attention(batch, query, key, value)

    def run_core_attention(self, batch: PackedBatch, *tensors: Tensor) -> Tensor:
        """Calls the core attention, recomputing it in the backward pass when selective recompute asks for it."""
        if self.checkpoint_core_attention and self.training:
            return tensor_parallel.checkpoint(
                lambda *args: self.core_attention(*args, batch), False, *tensors
            )
        return self.core_attention(*tensors, batch)


class AHASelfAttention(PackedSelfAttention):
    """All-or-Here self-attention (arXiv 2512.22562): a router decides per token and head between full and window.

    Args:
        aha: the attention variant's options; everything else is Megatron-core's.
    """

    def __init__(self, *args: Any, aha: AHAConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aha = aha
        self.router = AHARouter(self.config, aha)

    def attend(
        self, hidden_states: Tensor, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch
    ) -> Tensor:
        """Returns ``[tokens, local heads, head_dim]`` with each token-head attending as its route says."""
        route = self.decide(hidden_states, batch)
        heads_per_router = query.size(1) // route.size(1)
        if heads_per_router > 1:
            route = route.repeat_interleave(heads_per_router, dim=1)  # [tokens, local heads]
        return self.run_core_attention(batch, query, key, value, route)

    def decide(self, hidden_states: Tensor, batch: PackedBatch) -> Tensor:
        """Returns the routes, fp32 0 and 1 ``[tokens, local routers]``, and records usage once per micro-batch."""
        logits = self.router(hidden_states)
        decided = batch.decided_routes.pop(self.layer_number, None)
        recomputing = decided is not None
        if decided is None:
            decided = logits.detach() > 0
            if self.training and not torch.is_grad_enabled():
                # First pass of a recomputed layer: the second must not decide again from rounded-otherwise logits.
                batch.decided_routes[self.layer_number] = decided
        if batch.tracker is not None and not recomputing:
            beyond = batch.document_position >= self.aha.window + self.aha.num_sink_tokens
            batch.tracker.record(
                self.layer_number, self.router.first_router, logits, decided, batch.loss_mask, beyond
            )
        return DecideRoutes.apply(logits, decided, batch.loss_mask, batch.router_loss_weight)
