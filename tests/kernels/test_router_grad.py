"""Router gradient modes: the sampled one is unbiased and depends on its counters alone."""

from __future__ import annotations

import pytest
import torch

from aha_kernels.sampling import uniform_draws
from tests.kernels.helpers import Call, make_call, run, shortest_banded

HEADS = torch.arange(4)


def test_draws_are_uniform_and_uncorrelated() -> None:
    draws = uniform_draws(3, 1, HEADS, torch.arange(20_000)[None])[0]  # [positions, heads]
    assert draws.min() >= 0.0 and draws.max() < 1.0
    assert (draws.mean(0) - 0.5).abs().max() < 0.01
    assert (draws.var(0) - 1 / 12).abs().max() < 0.003
    centred = (draws - 0.5) / draws.std()
    assert (centred.T @ centred / len(draws) - torch.eye(4)).abs().max() < 0.04
    assert (centred[1:] * centred[:-1]).mean(0).abs().max() < 0.04
    other = uniform_draws(4, 1, HEADS, torch.arange(20_000)[None])[0]
    assert (centred * (other - 0.5)).mean(0).abs().max() < 0.02


def test_draws_follow_seed_layer_head_and_position_only() -> None:
    positions = torch.arange(64)[None]
    whole = uniform_draws(5, 2, HEADS, positions)
    assert torch.equal(whole[:, :, 2:], uniform_draws(5, 2, HEADS[2:], positions))
    assert torch.equal(whole[:, 40:], uniform_draws(5, 2, HEADS, positions[:, 40:]))
    per_row = uniform_draws(torch.tensor([[5], [6]]), 2, HEADS, positions.expand(2, 64))
    assert torch.equal(per_row[0], whole[0]) and not torch.equal(per_row[1], whole[0])
    assert not torch.equal(uniform_draws(5, 3, HEADS, positions), whole)


@pytest.mark.parametrize("scores", [0, 10**9])
def test_sampled_gradients_average_to_the_exact_ones(scores: int) -> None:
    call = make_call(queries=48, window=6, usage=0.2, heads=4, kv_heads=4)
    rate, seeds = 0.3, 400
    with shortest_banded(scores):
        exact = run(call)[4]
        samples = []
        for seed in range(seeds):
            options = {"router_grad": f"sampled:{rate}", "router_seed": seed}
            samples.append(run(Call(*call.leaves(), call.window, options))[4])
    drawn = torch.stack(samples)
    opened = call.route.detach() == 1
    assert torch.allclose(drawn[:, opened], exact[opened].expand(seeds, -1), atol=1e-5)
    # A here-token is drawn with probability rate and weight 1 / rate: variance exact^2 (1 - rate) / rate.
    expected_deviation = exact.abs() * ((1 - rate) / rate / seeds) ** 0.5
    z = (drawn.mean(0) - exact)[~opened] / expected_deviation[~opened].clamp_min(1e-6)
    assert z.abs().max() < 4.5 and 0.7 < z[exact[~opened] != 0].std() < 1.3
    total = drawn.sum((1, 2, 3))
    sigma = (exact[~opened].square().sum() * (1 - rate) / rate).sqrt()
    assert (total.mean() - exact.sum()).abs() < 4 * sigma / seeds**0.5
    assert 0.8 < total.std() / sigma < 1.2


def test_sampling_does_not_depend_on_documents_before_heads_or_chunks() -> None:
    call = make_call(queries=64, window=6, usage=0.2, heads=4, kv_heads=4)
    options = {"router_grad": "sampled:0.4", "router_seed": 9, "layer": 3}
    whole = run(Call(*call.leaves(), 6, options))[4]

    half = [x[:, :, 2:].detach().requires_grad_() for x in call.leaves()]
    part = run(Call(*half, 6, options | {"head_offset": 2}))[4]  # type: ignore[arg-type]
    assert torch.equal(part != 0, whole[:, :, 2:] != 0)

    twice = [torch.cat([x, x], 1).detach().requires_grad_() for x in call.leaves()]
    borders = torch.tensor([0, 64, 128], dtype=torch.int32)
    packed = run(Call(*twice, 6, options | {"cu_seqlens": borders}))[4]  # type: ignore[arg-type]
    assert torch.equal(packed[:, :64] != 0, whole != 0) and torch.equal(packed[:, 64:] != 0, whole != 0)

    late = [call.q[:, 40:], call.k, call.v, call.route[:, 40:]]
    chunk = run(Call(*(x.detach().requires_grad_() for x in late), 6, options | {"query_offset": 40}))[4]  # type: ignore[arg-type]
    assert torch.equal(chunk != 0, whole[:, 40:] != 0)


def test_none_gives_the_router_no_gradient_and_leaves_the_others() -> None:
    call = make_call(queries=64)
    out = run(call)
    from aha_kernels import aha_attention

    again = aha_attention(*call.leaves(), 8, router_grad="none")
    gradient = torch.randn(again.shape, generator=torch.Generator().manual_seed(7))
    grads = torch.autograd.grad(again, call.leaves(), gradient, allow_unused=True)
    assert grads[3] is None
    assert all(torch.equal(x, y) for x, y in zip(out[1:4], grads[:3], strict=True))
