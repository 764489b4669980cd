"""Rules of All-or-Here Attention."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_aha.config.names import BACKENDS, GPU_BACKENDS, GRANULARITIES
from megatron_aha.config.rules.common import above_zero, at_least, one_of
from megatron_aha.config.run import RunConfig
from megatron_aha.errors import nearest


def aha_problems(config: RunConfig, has_gpu: bool | None) -> Iterator[str]:
    """Yields a sentence for every impossible option of the attention; ``has_gpu`` None means not known."""
    aha = config.aha
    if aha.window < 1:
        yield (
            f"--aha.window is {aha.window}, but a token always sees itself, which counts as the first "
            "key of its window; use 1 or more (the paper uses 256)"
        )
    yield from at_least(
        config,
        0,
        ["aha.num_sink_tokens", "aha.loss_coefficient", "aha.init_std", "aha.weight_decay"],
    )
    yield from above_zero(config, ["aha.lr"])
    yield from one_of(config, "aha.granularity", GRANULARITIES)
    yield from one_of(config, "aha.backend", BACKENDS)
    if aha.backend in GPU_BACKENDS and has_gpu is False:
        yield f"--aha.backend {aha.backend} needs an NVIDIA GPU and there is none here; use auto or torch"
    yield from _router_grad_problems(aha.router_grad)


def _router_grad_problems(router_grad: str) -> Iterator[str]:
    kind, colon, rate = router_grad.partition(":")
    if kind == "sampled":
        if not re.fullmatch(r"\d*\.?\d+([eE][-+]?\d+)?", rate) or not 0 < float(rate) <= 1:
            yield (
                f"--aha.router_grad '{router_grad}' needs a share of tokens above 0 and at most 1 behind the "
                "colon; use sampled:0.1 for a tenth of them"
            )
    elif colon or kind not in ("exact", "none"):
        hint = nearest(kind, ["exact", "sampled:0.1", "none"])
        yield f"--aha.router_grad '{router_grad}' is not one of exact, sampled:RATE, none{hint}"
