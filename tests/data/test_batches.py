"""Batches: borders of documents, positions, masks, and the samples of a step in every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_aha.data.batches import BatchSource, cu_seqlens_from_tokens, position_ids_from_borders
from megatron_aha.errors import UserError

EOD = 9


@pytest.mark.parametrize(
    ("tokens", "borders"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], [0, 4, 8]),
        ([1, EOD, 3, 4, 5, 6, EOD, 8], [0, 2, 4, 7, 8]),
        ([EOD, EOD, 3, EOD, 5, 6, 7, 8], [0, 1, 2, 4, 8]),
        ([1, 2, 3, EOD, EOD, EOD, EOD, EOD], [0, 4, 5, 6, 7, 8]),
    ],
    ids=["no_end", "ends_inside", "one_token_documents_and_end_at_border", "only_ends"],
)
def test_documents_end_with_their_eod_and_with_the_sequence(tokens: list[int], borders: list[int]) -> None:
    found = cu_seqlens_from_tokens(torch.tensor(tokens), EOD, seq_length=4)
    assert found.dtype == torch.int32
    assert found.tolist() == borders


@given(st.lists(st.integers(0, EOD), min_size=12, max_size=12))
def test_a_token_shares_a_document_exactly_with_its_neighbours_until_an_eod(tokens: list[int]) -> None:
    borders = cu_seqlens_from_tokens(torch.tensor(tokens), EOD, seq_length=4).tolist()
    assert borders[0] == 0 and borders[-1] == 12 and sorted(set(borders)) == borders
    for position in range(1, 12):
        begins = position % 4 == 0 or tokens[position - 1] == EOD
        assert (position in borders) == begins


def test_positions_restart_at_each_border() -> None:
    positions = position_ids_from_borders(torch.tensor([0, 1, 4, 6], dtype=torch.int32))
    assert positions.tolist() == [0, 0, 1, 2, 0, 1]
    assert positions.dtype == torch.int64


class Numbered:
    """Sample ``i`` holds the tokens ``100 * i + 0 .. 3``, the third of which ends a document."""

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([100 * sample, 100 * sample + 1, EOD, 100 * sample + 3])
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.tensor([1.0, 1.0, 0.0, 1.0])}


def source(
    dp_rank: int = 0, dp_size: int = 1, micro: int = 1, global_size: int = 4, reset: bool = False
) -> BatchSource:
    return BatchSource(
        Numbered(),
        EOD,
        micro_batch_size=micro,
        global_batch_size=global_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        reset_position_ids=reset,
    )


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_a_step_reads_the_same_samples_in_every_layout(dp_size: int, micro: int) -> None:
    seen = []
    for rank in range(dp_size):
        batches = source(rank, dp_size, micro).micro_batches(consumed_samples=8)
        assert len(batches) == 4 // (dp_size * micro)
        assert all(batch.tokens.shape == (4 * micro,) for batch in batches)
        seen += [int(first) // 100 for batch in batches for first in batch.tokens[::4]]
    assert sorted(seen) == [8, 9, 10, 11]


def test_asking_twice_gives_the_same_and_every_sequence_begins_a_document() -> None:
    batches = source(micro=2)
    first, again = batches.micro_batches(4)[0], batches.micro_batches(4)[0]
    assert torch.equal(first.tokens, again.tokens)
    assert first.cu_seqlens.tolist() == [0, 3, 4, 7, 8]
    assert first.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert first.loss_mask.dtype == torch.float32
    assert first.loss_mask.tolist() == [1, 1, 0, 1] * 2


def test_positions_restart_at_documents_when_asked() -> None:
    assert source(micro=2, reset=True).micro_batches(0)[0].position_ids.tolist() == [0, 1, 2, 0] * 2


def test_a_global_batch_that_ranks_cannot_share_is_refused_with_the_nearest_that_they_can() -> None:
    with pytest.raises(UserError, match=r"global_batch_size 10 .* 2 x 3 data-parallel ranks = 6; .*: 12"):
        source(dp_size=3, micro=2, global_size=10)
