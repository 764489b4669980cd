"""The torch path keeps nothing as long as the sequence but what it returns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from aha_kernels import aha_attention
from tests.kernels.helpers import make_call


def _peak_mib(step: Callable[[], None]) -> float:
    """Returns the most memory that PyTorch held at any time of a step, above what it held before, in MiB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak / 2**20


def test_temporaries_of_a_training_step_do_not_grow_with_the_sequence():
    beside = {}
    for tokens in (2048, 8192):
        call = make_call(
            queries=tokens, heads=4, kv_heads=4, head_dim=64, window=256, usage=0.07, router_grad="none"
        )
        gradient = torch.randn_like(call.q)

        def step(call=call, gradient=gradient) -> None:
            out = aha_attention(*call.leaves(), call.window, **call.options)
            torch.autograd.grad(out, call.leaves()[:3], gradient)

        step()
        # Output, three gradients and the log-sum-exp, in fp32.
        returned = 4 * (4 * call.q.numel() + call.route.numel())
        beside[tokens] = _peak_mib(step) - returned / 2**20
    assert 0 < beside[8192] < 1.5
    assert beside[8192] < beside[2048] + 0.25
