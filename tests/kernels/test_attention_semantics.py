"""What attention must do at its edges: windows, documents, chunks, empty rows, router gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aha_kernels import aha_attention
from aha_kernels.reference import visible_keys
from tests.kernels.helpers import (
    Call,
    assert_close,
    in_chunks,
    make_call,
    run,
    run_reference,
    seen,
    shortest_banded,
)

BOTH_PATHS = pytest.mark.parametrize("scores", [0, 10**9], ids=["bands", "dense"])


@BOTH_PATHS
@pytest.mark.parametrize("window", [1, 2, 8, 31, 32, 33])
def test_a_here_token_sees_exactly_its_window(window: int, scores: int) -> None:
    with shortest_banded(scores):
        table = seen(0.0, window, 32)
    expected = [[max(0, t - window + 1) <= j <= t for j in range(32)] for t in range(32)]
    assert table.tolist() == expected


@BOTH_PATHS
def test_an_all_token_sees_every_key_before_it(scores: int) -> None:
    with shortest_banded(scores):
        assert torch.equal(seen(1.0, 3, 32), torch.ones(32, 32).tril().bool())


@BOTH_PATHS
def test_sinks_and_documents_bound_what_is_seen(scores: int) -> None:
    borders = torch.tensor([0, 5, 6, 32], dtype=torch.int32)
    with shortest_banded(scores):
        table = seen(0.0, 4, 32, cu_seqlens=borders, num_sink_tokens=2)
    expected = visible_keys(1, 32, 32, 4, cu_seqlens=borders, num_sink_tokens=2)[1][0]
    assert torch.equal(table, expected)
    assert table[20].nonzero()[:, 0].tolist() == [6, 7, 17, 18, 19, 20]


@BOTH_PATHS
def test_a_key_outside_the_window_changes_nothing(scores: int) -> None:
    call = make_call(queries=60, window=8, usage=0.0)
    with shortest_banded(scores), torch.no_grad():
        before = aha_attention(*call.leaves(), 8)
        call.k[:, 10] += 100.0
        call.v[:, 10] += 100.0
        after = aha_attention(*call.leaves(), 8)
    changed = (before != after).any(-1).any(-1)[0].nonzero()[:, 0].tolist()
    assert changed == list(range(10, 18))


@BOTH_PATHS
@pytest.mark.parametrize("usage", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("chunks", [[20, 12], [1] * 32])
def test_chunks_equal_one_pass(chunks: list[int], usage: float, scores: int) -> None:
    call = make_call(queries=32, window=8, usage=usage)
    with torch.no_grad():
        whole = aha_attention(*call.leaves(), 8)
        with shortest_banded(scores):
            parts = in_chunks(call, chunks)
    assert torch.allclose(parts, whole, atol=1e-6)


@BOTH_PATHS
@pytest.mark.parametrize("borders", [[0, 0, 1, 1, 32], [0, 1, 2, 32], [0, 32, 32]])
def test_empty_and_one_token_documents(borders: list[int], scores: int) -> None:
    call = make_call(queries=32, window=4, usage=0.5, cu_seqlens=torch.tensor(borders, dtype=torch.int32))
    with shortest_banded(scores):
        assert_close(run(call), run_reference(call), torch.float32)


@BOTH_PATHS
@pytest.mark.parametrize("length", [1, 7, 33, 257])
@pytest.mark.parametrize("window", [1, 10, 500])
def test_lengths_and_windows_that_divide_nothing(length: int, window: int, scores: int) -> None:
    call = make_call(queries=length, window=window)
    with shortest_banded(scores):
        assert_close(run(call), run_reference(call), torch.float32)


@BOTH_PATHS
@pytest.mark.parametrize("usage", [0.0, 0.5, 1.0])
def test_rows_that_see_nothing_are_zero_and_give_no_gradient(usage: float, scores: int) -> None:
    start, end = torch.tensor([5, 20, 0]), torch.tensor([20, 20, 3])
    call = make_call(batch=3, queries=20, window=4, usage=usage, key_start=start, key_end=end)
    with shortest_banded(scores):
        out, dq, dk, dv, droute = run(call)
    assert_close((out, dq, dk, dv, droute), run_reference(call), torch.float32)
    assert not out[0, :5].any() and not out[1].any()
    assert not dq[0, :5].any() and not dk[1].any() and not droute[1].any()
    assert not dk[2, 3:].any() and not dv[2, 3:].any()


@BOTH_PATHS
@pytest.mark.parametrize("route", [0.0, 1.0])
def test_the_route_gradient_is_all_minus_here_whatever_was_chosen(route: float, scores: int) -> None:
    call = make_call(queries=40, window=8)
    call = Call(call.q, call.k, call.v, torch.full((1, 40, 4), route, requires_grad=True), 8)
    with shortest_banded(scores):
        droute = run(call)[4]
    gradient = torch.randn(call.q.shape, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        everything, here = (
            aha_attention(call.q, call.k, call.v, x.bool(), 8) for x in (call.route * 0 + 1, call.route * 0)
        )
    assert torch.allclose(droute, (gradient * (everything - here)).sum(-1), atol=1e-5)
    assert droute[:, 8:].abs().min() > 0
    assert not droute[:, :8].any()  # no key beyond the window: nothing to choose


@pytest.mark.parametrize("logit", [-20.0, -1e-8, 0.0, 1e-8, 20.0])
def test_the_straight_through_gradient_does_not_depend_on_how_sure_the_router_is(logit: float) -> None:
    call = make_call(queries=40, window=8)
    z = torch.full((1, 40, 4), logit)
    hard = Call(call.q, call.k, call.v, (z > 0).float().requires_grad_(), 8)
    droute = run(hard)[4]
    assert torch.allclose(droute.double(), run_reference(hard)[4], atol=1e-5)
    assert droute[:, 8:].abs().min() > 0


def test_recomputation_with_saved_routes_gives_the_same_bits() -> None:
    from torch.utils.checkpoint import checkpoint

    call = make_call(queries=300, window=16, usage=0.3)
    logits = torch.tensor([0.0, 1e-8, -1e-8, 1.0]).expand(1, 300, 4)
    route = (logits > 0).float().requires_grad_()
    call = Call(call.q, call.k, call.v, route, 16)
    plain = run(call)
    out = checkpoint(lambda *x: aha_attention(*x, 16), *call.leaves(), use_reentrant=False)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    again = (out.detach(), *torch.autograd.grad(out, call.leaves(), gradient))
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


def test_an_input_used_twice_gets_the_sum_of_its_gradients() -> None:
    call = make_call(queries=50, heads=2, kv_heads=2)
    out = aha_attention(call.q, call.q, call.q, call.route, 8)
    (grad,) = torch.autograd.grad(out.square().sum(), call.q)
    x = call.q.detach().double().requires_grad_()
    y = make_reference(x, call.route.detach().double())
    (truth,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.allclose(grad.double(), truth, atol=1e-5)


def make_reference(x: Tensor, route: Tensor) -> Tensor:
    from aha_kernels.reference import reference_attention

    return reference_attention(x, x, x, route, 8)


def test_compiles_into_one_graph() -> None:
    call = make_call(queries=64)
    compiled = torch.compile(lambda *x: aha_attention(*x, 8) * 2.0, fullgraph=True, backend="aot_eager")
    out = compiled(*call.leaves())
    grads = torch.autograd.grad(out.sum(), call.leaves())
    eager = aha_attention(*call.leaves(), 8) * 2.0
    assert torch.equal(out, eager)
    for x, y in zip(grads, torch.autograd.grad(eager.sum(), call.leaves()), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("router_grad_rate", [0.0, 1.0])
def test_operators_keep_the_rules_of_torch_library(router_grad_rate: float) -> None:
    q = torch.randn(1, 12, 2, 8, requires_grad=True)
    route = torch.ones(1, 12, 2, requires_grad=True)
    scalars = (4, 0.35, 0, 0, None, None, None, None, "torch", router_grad_rate, 0, None, 0, 0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.aha_kernels.attention.default, (q, q, q, route, *scalars), test_utils=checks
    )


def test_a_bool_route_computes_without_router_gradient() -> None:
    call = make_call(queries=40)
    out = aha_attention(call.q, call.k, call.v, call.route.bool(), 8)
    assert torch.equal(out, aha_attention(*call.leaves(), 8))
    assert torch.autograd.grad(out.sum(), call.q)[0].abs().sum() > 0
