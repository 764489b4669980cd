"""Command line of ``tools/freeze_heads.py``: heads that hardly look beyond their window no longer may."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_aha.errors import UserError
from megatron_aha.evaluation.perplexity import TextResult, measure_text, read_texts, sequences
from megatron_aha.evaluation.report_file import check_report_file
from megatron_aha.hf.cli import quiet_libraries
from megatron_aha.hf.code import write_code
from megatron_aha.hf.configuration import check_architecture
from megatron_aha.hf.dtypes import parse_dtype
from megatron_aha.hf.families import FAMILIES
from megatron_aha.hf.generate import add_model_options
from megatron_aha.hf.loading import LoadedModel, load_model
from megatron_aha.hf.source import CARD_FILE, CONFIG_FILE, read_json
from megatron_aha.hf.usage import UsageCounter


@dataclass
class Report:
    """What freezing changed.

    Args:
        heads: routers, frozen or not.
        frozen: routers that are not asked any more.
        groups: key/value groups of layers with routers.
        static_groups: groups all of whose heads are frozen; a cache keeps their last window only.
        context: tokens in the caches that were measured.
        cache_bytes: held by the cache before and after.
        perplexity: on the text, before and after.
        usage: share of token-heads on full attention, before and after.
    """

    heads: int
    frozen: int
    groups: int
    static_groups: int
    context: int
    cache_bytes: tuple[int, int]
    perplexity: tuple[float, float]
    usage: tuple[float | None, float | None]


def main(argv: Sequence[str]) -> None:
    """Turns heads whose usage on a text stays at or under a threshold into static sliding-window heads.

    The usage counted is that of tokens that have a key beyond their window. Where all heads of a key/value group are
    frozen, a dynamic cache drops the group's keys and values beyond the window: that is what saves memory.
    """
    quiet_libraries()
    options = _parse(argv)
    report = freeze(options)
    before, after = report.cache_bytes
    print(
        f"frozen: {report.frozen} of {report.heads} routers; static: {report.static_groups} of {report.groups} groups"
    )
    print(
        f"KV cache at {report.context} tokens: {before:,} bytes before, {after:,} after ({after / before:.1%})"
    )
    print(f"perplexity: {report.perplexity[0]:.4f} before, {report.perplexity[1]:.4f} after")
    print(f"usage of full attention: {report.usage[0]:.4f} before, {report.usage[1]:.4f} after")
    print(f"wrote {options.output}")
    if options.json:
        Path(options.json).write_text(
            json.dumps(dataclasses.asdict(report), indent=2) + "\n", encoding="utf-8"
        )


def freeze(options: argparse.Namespace) -> Report:
    """Writes the folder and returns what changed. Raises UserError when nothing can be frozen or decided."""
    source, output = Path(options.model), Path(options.output)
    if not (source / CONFIG_FILE).is_file():
        raise UserError(
            f"--model {source} is no exported folder; export a checkpoint with tools/convert_to_hf.py first"
        )
    if output.exists():
        raise UserError(f"--output {output} exists; choose another folder")
    texts = read_texts(options.text, options.json_key)
    loaded = _load(options, source)
    if not loaded.routed or not hasattr(loaded.model.config, "frozen_routers"):
        raise UserError(f"--model {source} has no routers; there is nothing to freeze")
    with UsageCounter(loaded.model) as counter:
        before = measure_text(loaded, texts, options.length, options.max_tokens)
    usage = counter.per_router(beyond_window=True)  # [layers with routers, routers]
    if usage is None:
        raise UserError(
            f"--text has no token beyond the window of {loaded.model.config.aha_window} tokens at --length "
            f"{options.length}; give longer documents, or a larger --length"
        )
    frozen: list[list[int]] = [[] for _ in range(loaded.model.config.num_hidden_layers)]
    for layer, row in zip(counter.layers, usage, strict=True):
        frozen[layer] = [router for router, share in enumerate(row.tolist()) if share <= options.threshold]
    if not any(frozen):
        least = float(usage.min())
        raise UserError(
            f"--threshold {options.threshold}: no head's usage is that low, the lowest is {least:.4g}"
        )
    longest = max(sequences(loaded.needed_tokenizer(), texts, options.length, options.max_tokens), key=len)
    held = cache_bytes(loaded.model, longest)
    _write(source, output, frozen, options.threshold)
    loaded = _load(options, output)
    after = measure_text(loaded, texts, options.length, options.max_tokens)
    return _report(
        loaded.model.config, usage, frozen, longest, (held, cache_bytes(loaded.model, longest)), before, after
    )


def _load(options: argparse.Namespace, folder: Path) -> LoadedModel:
    return load_model(
        folder, dtype=parse_dtype(options.dtype), attention=options.attention, device=options.device
    )


def _report(
    config: Any,
    usage: Tensor,
    frozen: list[list[int]],
    context: list[int],
    held: tuple[int, int],
    before: TextResult,
    after: TextResult,
) -> Report:
    return Report(
        heads=usage.numel(),
        frozen=sum(len(layer) for layer in frozen),
        groups=len(usage) * config.num_key_value_heads,
        static_groups=sum(len(config.static_groups(layer)) for layer in range(config.num_hidden_layers)),
        context=len(context),
        cache_bytes=held,
        perplexity=(before.perplexity, after.perplexity),
        usage=(before.usage, after.usage),
    )


@torch.inference_mode()
def cache_bytes(model: Any, tokens: list[int]) -> int:
    """Returns the bytes of memory that the cache holds after these tokens, unused parts of storages included."""
    from megatron_aha.hf.exported.modeling_aha import CACHE_FIELD

    output = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=True, logits_to_keep=1)
    held = {}
    for layer in getattr(output, CACHE_FIELD).layers:
        for value in vars(layer).values():
            if isinstance(value, Tensor) and value.dim() == 4:
                held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(held.values())


def _write(source: Path, output: Path, frozen: list[list[int]], threshold: float) -> None:
    """Copies the folder, with the frozen routers in its configuration and modelling code that knows of them."""
    shutil.copytree(source, output)
    config = read_json(output / CONFIG_FILE)
    architecture = check_architecture(config)
    (family,) = (name for name, each in FAMILIES.items() if each.aha == architecture)
    config["aha_frozen_routers"] = frozen
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (output / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    write_code(output, family)
    with (output / CARD_FILE).open("a", encoding="utf-8") as card:
        card.write(
            f"\n## Frozen heads\n\n{sum(len(layer) for layer in frozen)} routers, whose usage on a text was at most "
            f"{threshold}, are not asked any more (`aha_frozen_routers`): their heads see their window only. The usage "
            "above was measured before that.\n"
        )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="freeze_heads.py", description=main.__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER", help="exported model with routers")
    add("--output", required=True, metavar="FOLDER", help="folder to write")
    add("--text", nargs="+", required=True, metavar="PATH", help="text files, .jsonl files, folders or globs")
    add("--json-key", default="text", metavar="KEY", help="key of the text in JSON lines (default text)")
    add(
        "--threshold",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="largest usage of a frozen head (default 0)",
    )
    add("--length", type=int, default=1024, metavar="TOKENS", help="longest sequence (default 1024)")
    add("--max-tokens", type=int, metavar="N", help="read so many tokens of the text; default: all")
    add("--json", metavar="FILE", help="write the report here as well")
    add_model_options(parser)
    options = parser.parse_args(argv)
    if not 0 <= options.threshold <= 1:
        raise UserError(f"--threshold {options.threshold} must be a share from 0 to 1")
    for name in ("length", "max_tokens"):
        value = getattr(options, name)
        if value is not None and value < 2:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least 2")
    check_report_file(options.json)
    return options
