"""All-or-Here Attention itself: the window, the router and its loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AHAConfig:
    """Options of All-or-Here Attention (arXiv 2512.22562).

    Args:
        enabled: put a router on every head; off trains the plain dense model.
        window: keys that *here* sees, in tokens, **including the token itself** (flash-attn counts one less).
        num_sink_tokens: first tokens of each document that *here* always sees; the paper has none.
        granularity: ``head`` (a route per query head, the paper) or ``kv_group`` (a route per key/value
            head).
        loss_coefficient: lambda, the weight of the router loss mean(sigmoid(logit)); the paper's is 3e-4.
        bias: whether the router has a bias; the released OLMo-2 model has none.
        init_bias: initial router bias, a logit: 4.0 means p = 0.982, so that an imported model starts dense.
        init_std: standard deviation of the initial router weight; 0 makes every route start as the bias says.
        lr: learning rate of the router, following the model's schedule; None takes the model's.
        weight_decay: weight decay of the router.
        router_grad: ``exact``, ``sampled:RATE`` or ``none`` (see ``aha_kernels.aha_attention``).
        backend: ``auto``, ``reference``, ``torch``, ``triton`` or ``flash``.
    """

    enabled: bool = True
    window: int = 256
    num_sink_tokens: int = 0
    granularity: str = "head"
    loss_coefficient: float = 3e-4
    bias: bool = True
    init_bias: float = 4.0
    init_std: float = 0.0
    lr: float | None = None
    weight_decay: float = 0.0
    router_grad: str = "exact"
    backend: str = "auto"
