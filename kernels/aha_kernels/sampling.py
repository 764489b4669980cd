"""Which tokens give the router a gradient: all of them, a random share, or none.

The random share comes from a counter-based generator: the draw of a token is a hash of (seed, layer, head,
position) and of nothing else, so that it does not depend on the parallel layout, on chunks, on
recomputation or on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aha_kernels.errors import InputError
from aha_kernels.problem import Problem


def parse_router_grad(router_grad: str) -> float:
    """Returns the share of here-tokens that give a router gradient: 1 for "exact", RATE for "sampled:RATE",
    0 for "none".

    Raises InputError for anything else, or a RATE outside 0 < RATE <= 1.
    """
    if router_grad in ("exact", "none"):
        return 1.0 if router_grad == "exact" else 0.0
    kind, _, text = str(router_grad).partition(":")
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if kind != "sampled" or not 0.0 < rate <= 1.0:
        raise InputError(
            f'router_grad is {router_grad!r}, but must be "exact", "none" or "sampled:RATE" with '
            "0 < RATE <= 1, "
            'for example "sampled:0.05"'
        )
    return rate


def _mix(value: Tensor) -> Tensor:
    """Returns a bijective scramble of 32-bit values held in int64 (the "lowbias32" hash of C. Wellons,
    public domain).
    """
    value = value & 0xFFFFFFFF
    value = (value ^ (value >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    value = (value ^ (value >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return value ^ (value >> 16)


def uniform_draws(seed: int | Tensor, layer: int, heads: Tensor, positions: Tensor) -> Tensor:
    """Returns draws in [0, 1) as fp32 [batch, tokens, heads], a function of the four counters alone.

    seed: int, or int64 broadcastable to [batch, tokens] (for example one per sequence); heads: int64
        [heads], global indices; positions: int64 [batch, tokens].
    """
    seeds = torch.as_tensor(seed, dtype=torch.int64, device=positions.device).broadcast_to(positions.shape)
    state = _mix(_mix(seeds) ^ (seeds >> 32))
    state = _mix(state + 0x9E3779B9 * (layer + 1))
    state = _mix(state + positions)[..., None]
    state = _mix(state ^ _mix(heads.to(torch.int64) + 0x85EBCA6B))
    return (state >> 8).to(torch.float32) * 2.0**-24


def draw_probes(
    problem: Problem, route: Tensor, rate: float, seed: int | Tensor, layer: int, head_offset: int
) -> Tensor:
    """Returns bool like route [batch, queries, heads]: the here-tokens drawn with probability rate."""
    heads = torch.arange(route.shape[2], device=route.device) + head_offset
    positions = problem.positions(route.shape[0], route.shape[1], route.device)
    return (route == 0) & (uniform_draws(seed, layer, heads, positions) < rate)
