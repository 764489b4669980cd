"""Decoding against a cache equals the last rows of attention over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aha_kernels import InputError, aha_decode
from aha_kernels.reference import reference_attention
from tests.kernels.helpers import make_call


def paged(cache: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Returns (pages, block_table) that hold cache [batch, capacity, heads, dim] in shuffled pages."""
    batch, capacity, heads, dim = cache.shape
    count = capacity // page_size
    order = torch.randperm(batch * count, generator=torch.Generator().manual_seed(1))
    pages = torch.empty(batch * count, page_size, heads, dim)
    pages[order] = cache.reshape(batch * count, page_size, heads, dim)
    return pages, order.view(batch, count).int()


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("usage", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("new_tokens", [1, 3])
@pytest.mark.parametrize("sinks", [0, 2])
def test_decode_equals_the_definition(
    new_tokens: int, usage: float, page_size: int | None, sinks: int
) -> None:
    call = make_call(batch=6, queries=new_tokens, keys=64, window=10, usage=usage, heads=4, kv_heads=2)
    q, k, v, route = (x.detach() for x in call.leaves())
    # The fourth: one key is beyond the window of all new tokens. The fifth: some of them come before the first key.
    # The last: one key is beyond the window of the newest token alone.
    lengths = torch.tensor([64, 41, 7, 10 + new_tokens, 30, 11])
    starts = torch.tensor([0, 5, 2, 0, 29, 0])
    truth = reference_attention(
        *(x.double() for x in (q, k, v, route)),
        10,
        query_offset=lengths - new_tokens,
        key_start=starts,
        key_end=lengths,
        num_sink_tokens=sinks,
    )
    table = None
    if page_size is not None:
        (k, table), (v, _) = paged(k, page_size), paged(v, page_size)
    out = aha_decode(q, k, v, route, 10, lengths, table, key_start=starts, num_sink_tokens=sinks)
    assert torch.allclose(out.double(), truth, atol=1e-5)


def test_a_closed_group_reads_its_window_only() -> None:
    call = make_call(queries=1, keys=64, window=10, usage=0.0)
    q, k, v, route = (x.detach() for x in call.leaves())
    route[0, 0, 0] = 1.0  # the first KV group is open, the second is not
    k[:, :54, 1], v[:, :54, 1] = float("nan"), float("nan")
    assert torch.isfinite(aha_decode(q, k, v, route, 10, torch.tensor([64]))).all()
    k[:, 54, 1] = float("nan")
    assert torch.isnan(aha_decode(q, k, v, route, 10, torch.tensor([64]))).any()


def test_lengths_that_do_not_fit_are_refused() -> None:
    q, k, route = torch.zeros(1, 2, 2, 8), torch.zeros(1, 16, 1, 8), torch.zeros(1, 2, 2)
    with pytest.raises(InputError, match="reaches 17, .* room for 16"):
        aha_decode(q, k, k, route, 4, torch.tensor([17]))
    with pytest.raises(InputError, match="as short as 1, .* 2 new tokens"):
        aha_decode(q, k, k, route, 4, torch.tensor([1]))
    with pytest.raises(InputError, match="holds 1 items, but q has 2"):
        aha_decode(q.expand(2, 2, 2, 8), k, k, route.expand(2, 2, 2), 4, torch.tensor([9, 9]))
