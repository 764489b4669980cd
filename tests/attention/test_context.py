"""Context parallelism without processes: shares, pieces, and attention put together from them."""

from __future__ import annotations

import pytest
import torch

from aha_kernels import aha_attention
from megatron_aha.attention.pieces import cut_pieces
from megatron_aha.parallel.context import ContextShare

TOKENS, LENGTH = 48, 24
BORDERS = torch.tensor([0, 1, 7, 20, 24, 24 + 17, 48], dtype=torch.int32)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_are_equal_cover_the_row_and_weigh_the_same_under_a_causal_mask(size: int) -> None:
    shares = [ContextShare(TOKENS, LENGTH, rank, size) for rank in range(size)]
    rows = [share.take(torch.arange(TOKENS)) for share in shares]
    assert sorted(torch.cat(rows).tolist()) == list(range(TOKENS))
    assert {len(mine) for mine in rows} == {TOKENS // size}
    keys_seen = {int((mine % LENGTH + 1).sum()) for mine in rows}
    assert len(keys_seen) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("sinks", [0, 2])
def test_attention_of_the_pieces_is_that_of_the_row(size: int, sinks: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(1, TOKENS, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    route = (torch.rand(1, TOKENS, 4, generator=generator) > 0.5).double()
    expected = aha_attention(
        query, key, value, route, 3, cu_seqlens=BORDERS, num_sink_tokens=sinks, backend="reference"
    )
    found = torch.full_like(expected, float("nan"))
    for rank in range(size):
        share = ContextShare(TOKENS, LENGTH, rank, size)
        mine = share.take(torch.arange(TOKENS))
        pieces = cut_pieces(BORDERS, share.segments, torch.device("cpu"))
        assert [index for piece in pieces for index in range(*piece.rows.indices(TOKENS))] == list(
            range(len(mine))
        )
        for piece in pieces:
            rows = mine[piece.rows]
            found[:, rows] = aha_attention(
                query[:, rows],
                key[:, piece.keys],
                value[:, piece.keys],
                route[:, rows],
                3,
                query_offset=piece.query_offset,
                cu_seqlens=piece.cu_seqlens,
                num_sink_tokens=sinks,
                backend="reference",
            )
    assert (found - expected).abs().max() < 1e-12


def test_a_whole_row_is_one_piece() -> None:
    (piece,) = cut_pieces(BORDERS, [(0, TOKENS)], torch.device("cpu"))
    assert piece.cu_seqlens is not None and torch.equal(piece.cu_seqlens, BORDERS)
    assert (piece.rows, piece.keys, piece.query_offset) == (slice(0, TOKENS), slice(0, TOKENS), 0)
