"""Shared by the kernel tests: calls at random or drawn by hypothesis, and their comparison with the float64
definition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from aha_kernels import aha_attention, masked, torch_path
from aha_kernels.reference import reference_attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-12}
NAMES = ("out", "dq", "dk", "dv", "droute")


@dataclass
class Call:
    """Leaf tensors and options of one aha_attention call."""

    q: Tensor
    k: Tensor
    v: Tensor
    route: Tensor
    window: int
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the tensors that get gradients."""
        return self.q, self.k, self.v, self.route


def make_call(
    batch: int = 1,
    queries: int = 33,
    keys: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    window: int = 8,
    usage: float = 0.3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    strided: bool = False,
    spread: float = 1.0,
    **options: Any,
) -> Call:
    """Returns a random call; strided makes the tensors transposed views; spread scales the scores."""
    generator = torch.Generator().manual_seed(seed)

    def random(tokens: int, count: int, factor: float = 1.0) -> Tensor:
        shape = (batch, count, tokens, head_dim) if strided else (batch, tokens, count, head_dim)
        x = (torch.randn(shape, generator=generator) * factor).to(dtype)
        return (x.transpose(1, 2) if strided else x).detach().requires_grad_()

    keys = queries if keys is None else keys
    q, k, v = random(queries, heads, spread), random(keys, kv_heads), random(keys, kv_heads)
    route = torch.rand(batch, queries, heads, generator=generator) < usage
    route = route.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    return Call(q, k, v, route, window, options)


@st.composite
def geometries(draw: st.DrawFn, batch: int, queries: int) -> dict[str, Any]:
    """Returns options of :func:`make_call` that say which keys exist: all, documents, a cache before the
    queries (for all items or for each), or padding at both ends.
    """
    kind = draw(st.sampled_from(["plain", "documents", "offset", "offsets", "padding"]))

    def each(most: int) -> list[int]:
        return [draw(st.integers(0, most)) for _ in range(batch)]

    if kind == "documents":
        borders = sorted(draw(st.lists(st.integers(0, queries), max_size=5)))
        return {"batch": 1, "cu_seqlens": torch.tensor([0, *borders, queries], dtype=torch.int32)}
    if kind == "offset":
        (offset, *_) = each(60)
        return {"query_offset": offset, "keys": queries + offset}
    if kind == "offsets":
        offsets = each(60)
        return {"query_offset": torch.tensor(offsets), "keys": queries + max(offsets)}
    if kind == "padding":
        return {"key_start": torch.tensor(each(queries)), "key_end": torch.tensor(each(queries))}
    return {}


@st.composite
def calls(
    draw: st.DrawFn,
    heads: list[tuple[int, int]],
    head_dims: list[int],
    longest: int,
    most_rows: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
) -> dict[str, Any]:
    """Returns options of :func:`make_call`; heads lists pairs of KV heads and query heads of each, most_rows
    bounds queries times query heads.
    """
    kv_heads, group = draw(st.sampled_from(heads))
    batch = draw(st.integers(1, 3))
    queries = draw(st.integers(1, min(longest, most_rows // (kv_heads * group))))
    options = {
        "batch": batch,
        "queries": queries,
        "kv_heads": kv_heads,
        "heads": kv_heads * group,
        "head_dim": draw(st.sampled_from(head_dims)),
        "window": draw(st.sampled_from([1, 2, 7, 16, 33, 100, 400])),
        "usage": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "seed": draw(st.integers(0, 10_000)),
        "strided": draw(st.booleans()),
        "num_sink_tokens": draw(st.sampled_from([0, 0, 1, 5, 40])),
        "dtype": draw(st.sampled_from(dtypes)),
    }
    return options | draw(geometries(batch, queries))


def run(call: Call, **extra: Any) -> tuple[Tensor, ...]:
    """Returns (out, dq, dk, dv, droute) of aha_attention under a fixed random output gradient."""
    out = aha_attention(*call.leaves(), call.window, **call.options, **extra)
    return (out.detach(), *torch.autograd.grad(out, call.leaves(), output_gradient(out)))


def run_reference(call: Call, route_grad_weight: Tensor | None = None) -> tuple[Tensor, ...]:
    """Returns (out, dq, dk, dv, droute) of the definition in float64 under the same output gradient."""
    leaves = [x.detach().double().requires_grad_() for x in call.leaves()]
    ignored = ("router_grad", "router_seed", "layer", "head_offset", "backend")
    options = {name: value for name, value in call.options.items() if name not in ignored}
    out = reference_attention(*leaves, call.window, route_grad_weight=route_grad_weight, **options)
    gradient = output_gradient(out.to(call.q.dtype)).double()
    return (out.detach(), *torch.autograd.grad(out, leaves, gradient))


def output_gradient(out: Tensor) -> Tensor:
    """Returns a random gradient, the same for the same shape and dtype."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)


def assert_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Asserts that output and all gradients are finite and within the relative error of the dtype.

    Errors are root mean squares relative to the truth's, or to 0.05 (inputs are of size 1) where the truth
    vanishes.
    """
    for name, ours, truth in zip(NAMES, actual, expected, strict=True):
        assert torch.isfinite(ours).all(), f"{name} is not finite"
        error = (ours.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt().clamp_min(0.05)
        assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


def seen(route: float, window: int, length: int, **options: Any) -> Tensor:
    """Returns bool [queries, keys]: the keys whose value reaches a query's output."""
    q = torch.zeros(1, length, 1, 64)
    v = torch.eye(length, 64)[None, :, None]
    out = aha_attention(q, q, v, torch.full((1, length, 1), route), window, **options)
    return out[0, :, 0, :length] > 0


def in_chunks(call: Call, chunks: list[int], **options: Any) -> Tensor:
    """Returns the output of a call computed chunk by chunk of its queries, each behind the keys before it."""
    parts, offset = [], 0
    for size in chunks:
        rows, keys = slice(offset, offset + size), slice(0, offset + size)
        q, route = call.q[:, rows], call.route[:, rows]
        parts.append(
            aha_attention(
                q, call.k[:, keys], call.v[:, keys], route, call.window, query_offset=offset, **options
            )
        )
        offset += size
    return torch.cat(parts, 1)


@contextlib.contextmanager
def shortest_banded(scores: int) -> Iterator[None]:
    """Within it, segments of more than that many scores take near bands and far rows, shorter ones one
    dense pass; none takes masked calls of torch's kernel.
    """
    usual = torch_path.SHORT, masked.MODERATE
    torch_path.SHORT, masked.MODERATE = scores, 0
    try:
        yield
    finally:
        torch_path.SHORT, masked.MODERATE = usual
