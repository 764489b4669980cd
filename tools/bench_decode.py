#!/usr/bin/env python3
"""Tokens per second of decoding: a model with routers, forced to a usage, against the same weights without.

Both run in one process, in turns, over caches filled with random keys and values, through transformers alone (and
``aha_kernels`` for the routes). What it prints is a ratio: seconds of one machine are no property of the method.

    python tools/bench_decode.py --source SmolLM2.gguf --contexts 2048 8192 --usage 0.07
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_aha.config.aha import AHAConfig
from megatron_aha.entry import run_and_exit
from megatron_aha.hf.code import model_class
from megatron_aha.hf.configuration import write_config
from megatron_aha.hf.source import Source, open_source


def with_routers(source: Source, dense: Any, window: int, usage: float) -> Any:
    """Returns the dense model's weights with routers that choose *all* at random, for a share ``usage``."""
    values = write_config(source.model, AHAConfig(window=window, bias=True), "float32", {})
    del values["auto_map"]
    kind = model_class(source.model.family)
    model = kind(kind.config_class(**values, attn_implementation="aha_kernels")).eval()
    model.load_state_dict(dense.state_dict(), strict=False)
    draw = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        attention = layer.self_attn
        if attention.router is not None:
            routers = attention.router.out_features
            attention.route_logits = lambda states, n=routers: (
                usage - torch.rand(*states.shape[:2], n, generator=draw)
            )
    return model


class Decoder:
    """Decodes one token at a time at a given context."""

    def __init__(self, model: Any, context: int, tokens: int) -> None:
        from transformers import StaticCache

        from megatron_aha.hf.exported.modeling_aha import CACHE_FIELD

        config = model.config
        self.model, self.field = model, CACHE_FIELD
        self.cache = StaticCache(config=config, max_cache_len=context + tokens)
        draw = torch.Generator().manual_seed(1)
        shape = (1, config.num_key_value_heads, context, config.head_dim)
        for layer in range(config.num_hidden_layers):
            self.cache.update(torch.randn(shape, generator=draw), torch.randn(shape, generator=draw), layer)

    def step(self) -> float:
        """Returns the seconds of one token."""
        begin = time.perf_counter()
        with torch.no_grad():
            self.model(torch.tensor([[5]]), use_cache=True, **{self.field: self.cache})
        return time.perf_counter() - begin


def measure(source: Source, dense: Any, options: argparse.Namespace) -> list[dict[str, float]]:
    """Returns, for each context, how many times as many tokens per second the routed model gives."""
    routed = with_routers(source, dense, options.window, options.usage)
    rows = []
    for context in options.contexts:
        pair = [Decoder(model, context, options.tokens + 1) for model in (dense, routed)]
        for decoder in pair:
            decoder.step()  # memory and threads
        times = [[decoder.step() for decoder in pair] for _ in range(options.tokens)]
        ratio = statistics.median(slow / fast for slow, fast in times)
        rows.append({"context": context, "ratio": ratio, "usage": options.usage, "window": options.window})
    return rows


def main(argv: Sequence[str]) -> None:
    """Prints the ratios as a table, and as JSON with ``--json``."""
    parser = argparse.ArgumentParser(prog="bench_decode.py", description=main.__doc__)
    parser.add_argument(
        "--source", required=True, metavar="PATH", help="dense Hugging Face folder or .gguf file"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192], metavar="TOKENS")
    parser.add_argument("--usage", type=float, default=0.07, help="share of token-heads that choose all")
    parser.add_argument("--window", type=int, default=256, help="keys, the token itself included")
    parser.add_argument("--tokens", type=int, default=16, help="tokens decoded by each model")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    options = parser.parse_args(argv)
    source = open_source(options.source)
    rows = measure(source, source.reference(), options)
    print(f"usage {options.usage:.2f}, window {options.window}, {torch.get_num_threads()} threads")
    print(f"{'context':>8} {'tokens/s, routed over dense':>28}")
    for row in rows:
        print(f"{int(row['context']):>8} {row['ratio']:>28.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
