#!/usr/bin/env python3
"""Tokens per second, of prompts and of decoding: a model with routers, forced to a usage, against the same without.

Both run in one process, in turns, through transformers alone (and ``aha_kernels`` for the routes); decoding goes over
caches filled with random keys and values. Compare the ratios: seconds of one machine are no property of the method.

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
from torch import Tensor

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


def prefill(model: Any, tokens: Tensor) -> float:
    """Returns the seconds of a whole prompt ``[1, tokens]``, with the cache that decoding would go on from."""
    begin = time.perf_counter()
    with torch.no_grad():
        model(tokens, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - begin


def compared(name: str, pairs: Sequence[tuple[float, float]], tokens: int) -> dict[str, float]:
    """Returns tokens per second of both models and their ratio, medians over pairs of seconds (dense, routed)."""
    dense, routed = (tokens / statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    ratio = statistics.median(slow / fast for slow, fast in pairs)
    return {f"{name}_dense": dense, f"{name}_routed": routed, f"{name}_ratio": ratio}


def measure(source: Source, dense: Any, options: argparse.Namespace) -> list[dict[str, float]]:
    """Returns tokens per second, and how many times as many the routed model gives, for each context."""
    models = (dense, with_routers(source, dense, options.window, options.usage))
    draw = torch.Generator().manual_seed(2)
    rows = []
    for context in options.contexts:
        prompt = torch.randint(dense.config.vocab_size, (1, context), generator=draw)
        for model in models:
            prefill(model, prompt[:, : 2 * options.window])  # memory and threads
        prompts = [(prefill(models[0], prompt), prefill(models[1], prompt)) for _ in range(options.prompts)]
        decoders = [Decoder(model, context, options.tokens + 1) for model in models]
        for decoder in decoders:
            decoder.step()
        steps = [(decoders[0].step(), decoders[1].step()) for _ in range(options.tokens)]
        row = {"context": context, "usage": options.usage, "window": options.window}
        rows.append(row | compared("prefill", prompts, context) | compared("decode", steps, 1))
    return rows


def main(argv: Sequence[str]) -> None:
    """Prints tokens per second, dense and routed, and their ratios as a table, and as JSON with ``--json``."""
    parser = argparse.ArgumentParser(prog="bench_decode.py", description=main.__doc__)
    parser.add_argument(
        "--source", required=True, metavar="PATH", help="dense Hugging Face folder or .gguf file"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192], metavar="TOKENS")
    parser.add_argument("--usage", type=float, default=0.07, help="share of token-heads that choose all")
    parser.add_argument("--window", type=int, default=256, help="keys, the token itself included")
    parser.add_argument("--tokens", type=int, default=16, help="tokens decoded by each model")
    parser.add_argument("--prompts", type=int, default=1, help="prompts read by each model")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    options = parser.parse_args(argv)
    if min(options.prompts, options.tokens) < 1:
        parser.error("--prompts and --tokens must be at least 1")
    source = open_source(options.source)
    rows = measure(source, source.reference(), options)
    print(f"usage {options.usage:.2f}, window {options.window}, {torch.get_num_threads()} threads")
    print(f"{'tokens/s':>8} {'prefill':>30} {'decode':>30}")
    print(f"{'context':>8}" + f" {'dense':>10} {'routed':>10} {'ratio':>8}" * 2)
    for row in rows:
        cells = [f"{int(row['context']):>8}"]
        for name in ("prefill", "decode"):
            cells += [f"{row[f'{name}_{model}']:>10.1f}" for model in ("dense", "routed")]
            cells.append(f"{row[f'{name}_ratio']:>8.2f}")
        print(" ".join(cells))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
