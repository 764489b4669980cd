"""Command line of ``tools/evaluate.py``."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_aha.errors import UserError
from megatron_aha.evaluation.report_file import check_report_file
from megatron_aha.evaluation.suites import SUITES, Plan, plan
from megatron_aha.hf.cli import quiet_libraries
from megatron_aha.hf.dtypes import parse_dtype
from megatron_aha.hf.generate import add_model_options

_EXAMPLE = """example, a dense model beside one with routers:
  python tools/evaluate.py --models dense aha --text held_out.jsonl --length 4096 \\
      --suite aha-paper --tasks-dir tasks --json results.json
"""


def main(argv: Sequence[str]) -> None:
    """Measures models side by side: perplexity of a text by position, tasks of lm-evaluation-harness, and usage."""
    quiet_libraries()
    options = _parse(argv)
    dtype = parse_dtype(options.dtype)
    from megatron_aha.evaluation.harness import Harness
    from megatron_aha.evaluation.perplexity import measure_text, read_texts
    from megatron_aha.evaluation.table import ModelResult, names_of, tables
    from megatron_aha.hf.loading import load_model

    texts = read_texts(options.text, options.json_key) if options.text else []
    harness, todo = None, Plan([], [])
    if options.suite or options.tasks:
        harness = Harness(options.tasks_dir)
        todo = plan(
            options.suite,
            options.tasks,
            harness.local,
            offline=os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"),
            run_code=options.run_generated_code,
        )
        for task in todo.tasks:
            harness.manager(task)
    for line in todo.skipped:
        _say(line)
    results = []
    for name, path in zip(names_of(options.models), options.models, strict=True):
        _say(f"loading {path}")
        loaded = load_model(
            path,
            option="--models",
            dtype=dtype,
            attention=options.attention,
            device=options.device,
            say=_say,
        )
        result = ModelResult(name, path, getattr(loaded.model.config, "aha_window", None))
        if texts:
            result.text = measure_text(loaded, texts, options.length, options.max_tokens)
        if harness is not None:
            result.tasks = harness.run(
                loaded,
                todo.tasks,
                batch_size=options.batch_size,
                limit=options.limit,
                run_code=options.run_generated_code,
                say=_say,
            )
        results.append(result)
        del loaded
        gc.collect()
    print(tables(results))
    if options.json:
        content = {"models": [dataclasses.asdict(result) for result in results], "skipped": todo.skipped}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description=main.__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        required=True,
        metavar="PATH",
        help="Hugging Face folders, .gguf files or checkpoints of ours, one column each",
    )
    add(
        "--text",
        nargs="+",
        metavar="PATH",
        help="text files, .jsonl files, folders or globs; .gz is unpacked",
    )
    add("--json-key", default="text", metavar="KEY", help="key of the text in JSON lines (default text)")
    add("--length", type=int, default=1024, metavar="TOKENS", help="longest sequence (default 1024)")
    add("--max-tokens", type=int, metavar="N", help="read so many tokens of the text; default: all")
    add("--suite", metavar="NAME", help=f"tasks by the name of a set: {', '.join(SUITES)}")
    add("--tasks", nargs="+", default=[], metavar="NAME", help="tasks of lm-evaluation-harness")
    add(
        "--tasks-dir",
        metavar="FOLDER",
        help="task files of your own, which go before the harness's of that name (their groups name tasks there)",
    )
    add("--limit", type=int, metavar="N", help="documents of each task; default: all")
    add("--batch-size", type=int, default=1, metavar="N", help="requests computed together (default 1)")
    add(
        "--run-generated-code",
        action="store_true",
        help="tasks such as MBPP may run the Python code that the model writes, on this machine",
    )
    add("--json", metavar="FILE", help="write the results here as well")
    add_model_options(parser)
    options = parser.parse_args(argv)
    if not (options.text or options.suite or options.tasks):
        raise UserError("nothing to measure: give --text, --suite or --tasks")
    for name, least in (("length", 2), ("max_tokens", 2), ("limit", 1), ("batch_size", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    check_report_file(options.json)
    return options
