"""The torch path keeps nothing as long as the sequence but what it returns."""

from __future__ import annotations

import torch

from aha_kernels import aha_attention
from tests.kernels.helpers import make_call
from tools.bench_attention import Meter


def test_temporaries_of_a_training_step_do_not_grow_with_the_sequence():
    beside, meter = {}, Meter("cpu", "wall")
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
        beside[tokens] = meter.peak_mib(step) - returned / 2**20
    assert 0 < beside[8192] < 1.0
    assert beside[8192] < beside[2048] + 0.25
