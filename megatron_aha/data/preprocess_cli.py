"""Command line of ``tools/preprocess_data.py``."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from types import FrameType

from megatron_aha.data.sources import FORMATS
from megatron_aha.errors import UserError

_EXAMPLE = """example:
  python tools/preprocess_data.py --input corpus.jsonl.gz 'more/*.jsonl' --output data/corpus \\
      --tokenizer path/to/model_folder --eod '<|endoftext|>' --workers 8
"""


def main(arguments: Sequence[str]) -> None:
    """Runs preprocessing.

    Raises:
        UserError: something the user can mend; nothing was written.
    """
    options = _parser().parse_args(arguments)
    if options.workers < 1:
        raise UserError(f"--workers {options.workers} must be at least 1")
    from megatron_aha.data.preprocess import PreprocessOptions, preprocess
    from megatron_aha.hf.tokenizer import load_tokenizer

    chosen = PreprocessOptions(
        inputs=tuple(options.input),
        output=options.output,
        file_format=options.format,
        json_key=options.json_key,
        on_error=options.on_error,
        workers=options.workers,
        overwrite=options.overwrite,
    )
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        preprocess(chosen, load_tokenizer(options.tokenizer, options.eod, options.bos))
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preprocess_data.py",
        description="Turns text into a Megatron-core dataset with a description that training checks.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, directories or globs; .gz is unpacked",
    )
    add("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx and PREFIX.json")
    add(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help="folder, tokenizer.json, .gguf, sentencepiece .model, or an imported checkpoint",
    )
    add(
        "--eod", metavar="TOKEN", help="end-of-document token; default: the tokenizer's end-of-sequence token"
    )
    add(
        "--bos",
        metavar="TOKEN",
        help="beginning-of-document token, '' for none; default: what the tokenizer itself puts before a text",
    )
    add(
        "--format",
        choices=FORMATS,
        default="auto",
        help="jsonl: a document a line; text: a document a file; auto: by the ending .jsonl or .ndjson",
    )
    add("--json-key", default="text", metavar="KEY", help="key of the text in JSON lines (default: text)")
    add(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="what to do with records that are no documents",
    )
    add(
        "--workers",
        type=int,
        default=_cpus(),
        metavar="N",
        help="processes that tokenize (default: one per CPU)",
    )
    add("--overwrite", action="store_true", help="replace .bin and .idx files that have no PREFIX.json")
    return parser


def _cpus() -> int:
    """CPUs that this process may use, where the system tells, else CPUs of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _stop(number: int, frame: FrameType | None) -> None:
    """Lets a SIGTERM unwind like Ctrl-C, so that unfinished files are removed."""
    raise KeyboardInterrupt
