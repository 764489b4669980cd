"""One micro-batch as the layers see it: a flat row of tokens with the borders of its documents."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_aha.attention.pieces import Piece, cut_pieces
from megatron_aha.attention.tracker import UsageTracker
from megatron_aha.parallel.context import ContextShare


@dataclass
class PackedBatch(PackedSeqParams):
    """Megatron-core's packed-sequence parameters with what AHA needs beside them.

    It travels as an argument through every layer, also through recomputed ones and later pipeline stages, so nothing
    about a micro-batch is ever kept on a module.

    Attributes:
        position_ids: rotary position of each token, int64 ``[tokens]``.
        document_position: index of each token within its document, int64 ``[tokens]``.
        pieces: which keys each stretch of queries attends to.
        share: this rank's part of the row under context parallelism; every ``[tokens]`` here counts its own tokens.
        loss_mask: 1 for tokens that carry loss, fp32 ``[tokens]``.
        router_loss_weight: derivative of the scaled training loss by one token-head's ``p``.
        router_seed: of the sampled router gradient, int64 ``[tokens]``: what the draws of a document's tokens depend
            on beside layer, head and position in the document, so that no two documents of a run share draws.
        tracker: sums of ``p`` and of routes for reporting, or None.
        decided_routes: routes by layer number, kept between a recomputed layer's two passes so that a route is
            decided once; bool ``[tokens, local routers]``.
    """

    position_ids: Tensor = field(default_factory=lambda: torch.empty(0))
    document_position: Tensor = field(default_factory=lambda: torch.empty(0))
    pieces: list[Piece] = field(default_factory=list)
    share: ContextShare | None = None
    loss_mask: Tensor = field(default_factory=lambda: torch.empty(0))
    router_loss_weight: float = 0.0
    router_seed: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    tracker: UsageTracker | None = None
    decided_routes: dict[int, Tensor] = field(default_factory=dict)


def pack(
    position_ids: Tensor,
    cu_seqlens: Tensor,
    loss_mask: Tensor,
    *,
    device: torch.device,
    share: ContextShare | None = None,
    router_loss_weight: float = 0.0,
    router_seed: int = 0,
    tracker: UsageTracker | None = None,
) -> PackedBatch:
    """Builds the layers' view of one micro-batch from the whole row.

    Args:
        position_ids: int64 ``[tokens]``.
        cu_seqlens: document borders, int32 ``[documents + 1]``, on the CPU.
        loss_mask: fp32 ``[tokens]``.
        device: where the layers run.
        share: this rank's part of the row under context parallelism.
        router_loss_weight: see ``PackedBatch``.
        router_seed: of the row's first token; those after it count on from there.
        tracker: where usage is summed up.
    """
    lengths = cu_seqlens.diff()
    document_start = torch.repeat_interleave(cu_seqlens[:-1], lengths)
    document_position = torch.arange(position_ids.numel()) - document_start
    borders = cu_seqlens.to(device=device, dtype=torch.int32)
    pieces = cut_pieces(
        cu_seqlens, [(0, position_ids.numel())] if share is None else share.segments, torch.device(device)
    )
    # Megatron-core builds and caches a rotary table per length: powers of two keep them few.
    table_length = 1 << int(position_ids.max()).bit_length()
    if share is not None:
        position_ids, document_position, document_start, loss_mask = map(
            share.take, (position_ids, document_position, document_start, loss_mask)
        )
    return PackedBatch(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=table_length,
        max_seqlen_kv=table_length,
        position_ids=position_ids.to(device),
        document_position=document_position.to(device),
        pieces=pieces,
        share=share,
        loss_mask=loss_mask.to(device),
        router_loss_weight=router_loss_weight,
        router_seed=router_seed + document_start.to(device=device, dtype=torch.int64),
        tracker=tracker,
    )
