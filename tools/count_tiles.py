"""Prints how much the Triton kernels compute beyond what routes open: scores in tiles over scores opened.

    python tools/count_tiles.py --length 32768 --usage 0.07 --routes random clustered
    python tools/count_tiles.py --routes recorded.safetensors --window 256 --kv-heads 3

A recorded file holds a tensor "routes", [layers, tokens, heads] of 0 and 1: of an exported model,
``torch.cat(model(ids, output_router_stats=True).routes)`` of one sequence. Needs no GPU: it counts, it does
not time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from bench_attention import make_routes  # beside this file
from torch import Tensor

from aha_kernels.problem import Problem
from aha_kernels.tile_counts import TileCount, count_tiles
from aha_kernels.triton_tiles import TILES


def read_routes(path: Path) -> Tensor:
    """Returns recorded routes [layers, tokens, heads]."""
    from safetensors.torch import load_file

    return load_file(path)["routes"]


def line(name: str, route: Tensor, counts: dict[str, TileCount]) -> str:
    """Returns one row of the table."""
    shares = " | ".join(f"{counts[kind].ratio:.2f}" for kind in ("forward", "query", "key_value"))
    return f"| {name} | {route.shape[1]} | {float((route != 0).float().mean()):.3f} | {shares} |"


def main() -> None:
    """Counts and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--routes", nargs="+", default=["random", "clustered"], help="also: a recorded file")
    parser.add_argument("--length", type=int, default=32768, help="tokens of random and clustered routes")
    parser.add_argument("--usage", type=float, nargs="+", default=[0.25, 0.07, 0.02])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=256, help="keys a here-token sees, itself included")
    parser.add_argument("--sinks", type=int, default=0)
    parser.add_argument("--architecture", choices=list(TILES), default="sm_90")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    problem = Problem(arguments.window, 1.0, arguments.sinks)

    def count(name: str, route: Tensor) -> None:
        counts = count_tiles(
            route, route.shape[1], arguments.kv_heads, arguments.head_dim, problem,
            architecture=arguments.architecture,
        )  # fmt: skip
        print(line(name, route, counts), flush=True)

    print("| routes | length | usage | forward | backward, queries | backward, keys and values |")
    print("|" + "---|" * 6)
    for kind in arguments.routes:
        if kind not in ("random", "clustered"):
            for layer, route in enumerate(read_routes(Path(kind))):
                count(f"{Path(kind).name}, layer {layer}", route[None])
            continue
        for usage in arguments.usage:
            count(kind, make_routes(arguments.length, arguments.heads, usage, kind, "cpu"))


if __name__ == "__main__":
    main()
