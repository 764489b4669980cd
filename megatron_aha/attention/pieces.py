"""Which keys each stretch of a rank's queries attends to, documents and context parallelism considered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Piece:
    """Queries and the keys they are computed against in one call.

    Attributes:
        rows: this rank's queries.
        keys: of the whole row.
        query_offset: position of the first query among the keys; above 0 the piece is part of one document.
        lengths: queries of each document.
        cu_seqlens: borders of the documents, int32 ``[documents + 1]``; None with a query offset.
    """

    rows: slice
    keys: slice
    query_offset: int
    lengths: list[int]
    cu_seqlens: Tensor | None


def cut_pieces(borders: Tensor, segments: list[tuple[int, int]], device: torch.device) -> list[Piece]:
    """Returns the pieces of a rank's queries, in their order.

    A stretch that begins within a document yields one piece for that document's rest, at its true position behind the
    keys before the stretch, and one for the documents that begin within the stretch.

    Args:
        borders: of the documents of the whole row, int32 ``[documents + 1]``, on the CPU.
        segments: first and one-past-last token of each stretch of the row that this rank has.
        device: where the layers run.
    """
    pieces: list[Piece] = []
    row = 0
    for first, last in segments:
        for piece in _of_segment(borders, first, last, device):
            size = piece.rows.stop - piece.rows.start
            piece.rows = slice(row, row + size)
            row += size
            pieces.append(piece)
    return pieces


def _of_segment(borders: Tensor, first: int, last: int, device: torch.device) -> Iterator[Piece]:
    """Yields the pieces of one stretch; their rows count from the row's first token."""
    number = int(torch.searchsorted(borders, first, right=True)) - 1
    document_start, document_end = int(borders[number]), min(int(borders[number + 1]), last)
    if document_start < first:
        rows = slice(first, document_end)
        yield Piece(
            rows,
            slice(document_start, document_end),
            first - document_start,
            [document_end - first],
            None,
        )
        first = document_end
    if first == last:
        return
    within = borders[(borders >= first) & (borders < last)]
    cu_seqlens = torch.cat([within, torch.tensor([last])]).to(torch.int32) - first
    rows = slice(first, last)
    yield Piece(rows, rows, 0, cu_seqlens.diff().tolist(), cu_seqlens.to(device))
