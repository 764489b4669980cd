"""Prints how much the Triton kernels compute beyond what routes open: scores in tiles over scores opened.

    python tools/count_tiles.py --length 32768 --usage 0.07 --routes random clustered
    python tools/count_tiles.py --routes recorded.safetensors --window 256 --heads 9 --kv-heads 3

A recorded file holds a tensor "routes", [layers, tokens, routers] of 0 and 1: of an exported model,
``torch.cat(model(ids, output_router_stats=True).routes)`` of one sequence. A router serves as many query heads
as --heads holds per router. Needs no GPU: it counts, it does not time.
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


def read_routes(path: Path, heads: int | None) -> Tensor:
    """Returns recorded routes [layers, tokens, heads], each router's repeated for the query heads it serves.

    Raises ValueError if the file holds no routes, or the heads are no multiple of its routers.
    """
    from safetensors.torch import load_file

    if not path.is_file():
        raise ValueError(f"--routes {path} is not a file; else give random or clustered")
    routes = load_file(path).get("routes", torch.zeros(0))
    if routes.dim() != 3:
        raise ValueError(f'--routes {path} holds no tensor "routes" of layers, tokens and routers')
    routers = routes.shape[2]
    if heads is not None and heads % routers:
        raise ValueError(
            f"--routes {path} holds {routers} routers a layer, which do not divide --heads {heads}"
        )
    return routes.repeat_interleave((heads or routers) // routers, 2)


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
    parser.add_argument("--heads", type=int, help="query heads: 32, or a recorded file's routers by default")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=256, help="keys a here-token sees, itself included")
    parser.add_argument("--sinks", type=int, default=0)
    parser.add_argument("--architecture", choices=list(TILES), default="sm_90")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    problem = Problem(arguments.window, 1.0, arguments.sinks)

    def count(name: str, route: Tensor) -> None:
        if route.shape[2] % arguments.kv_heads:
            parser.error(f"{name} has {route.shape[2]} heads, no multiple of --kv-heads {arguments.kv_heads}")
        counts = count_tiles(
            route, route.shape[1], arguments.kv_heads, arguments.head_dim, problem,
            architecture=arguments.architecture,
        )  # fmt: skip
        print(line(name, route, counts), flush=True)

    print("| routes | length | usage | forward | backward, queries | backward, keys and values |")
    print("|" + "---|" * 6)
    for kind in arguments.routes:
        if kind not in ("random", "clustered"):
            try:
                routes = read_routes(Path(kind), arguments.heads)
            except ValueError as error:
                parser.error(str(error))
            for layer, route in enumerate(routes):
                count(f"{Path(kind).name}, layer {layer}", route[None])
            continue
        for usage in arguments.usage:
            count(kind, make_routes(arguments.length, arguments.heads or 32, usage, kind, "cpu"))


if __name__ == "__main__":
    main()
