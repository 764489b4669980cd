"""Command lines of ``tools/convert_from_hf.py`` and ``tools/convert_to_hf.py``."""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Sequence

from megatron_aha.errors import UserError
from megatron_aha.hf.dtypes import DTYPES, parse_dtype


def convert_from_hf(argv: Sequence[str]) -> None:
    """Imports a Hugging Face folder or a GGUF file as a checkpoint that training can start from."""
    parser = _parser("convert_from_hf.py", convert_from_hf.__doc__)
    parser.add_argument(
        "--source", required=True, metavar="PATH", help="Hugging Face folder, or a .gguf file"
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="checkpoint folder to write")
    _add_shard_size(parser, "2**30 bytes")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be written and needed, and write nothing"
    )
    options = parser.parse_args(argv)
    dtype = parse_dtype(options.dtype)
    _check(options)
    from megatron_aha.hf.importer import SHARD_BYTES, describe_import, import_checkpoint

    size = SHARD_BYTES if options.max_shard_gb is None else int(options.max_shard_gb * 10**9)
    shared = {"dtype": dtype, "shard_bytes": size, "workers": options.workers}
    if options.dry_run:
        describe_import(options.source, options.output, **shared)
    else:
        import_checkpoint(options.source, options.output, check=not options.skip_logits_check, **shared)


def convert_to_hf(argv: Sequence[str]) -> None:
    """Exports a checkpoint as a folder that transformers loads, with tokenizer and modelling code."""
    parser = _parser("convert_to_hf.py", convert_to_hf.__doc__)
    parser.add_argument(
        "--checkpoint", required=True, metavar="FOLDER", help="run folder (its latest step), or a step folder"
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="Hugging Face folder to write")
    _add_shard_size(parser, "5")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the model that --output holds, once the new one is whole",
    )
    parser.add_argument(
        "--format",
        choices=("aha", "faolmo"),
        default="aha",
        help="faolmo: as the authors of AHA released OLMo-2, for their modelling code (no router bias)",
    )
    parser.add_argument(
        "--base-model",
        metavar="NAME",
        help="name of the base model in the model card; default: of what was imported",
    )
    options = parser.parse_args(argv)
    dtype = parse_dtype(options.dtype)
    _check(options)
    from megatron_aha.hf.exporter import SHARD_BYTES, export_checkpoint

    export_checkpoint(
        options.checkpoint,
        options.output,
        dtype=dtype,
        shard_bytes=SHARD_BYTES if options.max_shard_gb is None else int(options.max_shard_gb * 10**9),
        workers=options.workers,
        overwrite=options.overwrite,
        check=not options.skip_logits_check,
        authors_format=options.format == "faolmo",
        base_model=options.base_model,
    )


def quiet_libraries() -> None:
    """Leaves progress bars out of log files, and Megatron-core's advice at import; before transformers is imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")


def _parser(name: str, description: str | None) -> argparse.ArgumentParser:
    quiet_libraries()
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument(
        "--dtype", metavar="TYPE", help=f"store weights as one of {', '.join(DTYPES)}; default: as they are"
    )
    parser.add_argument(
        "--skip-logits-check",
        action="store_true",
        help="do not compare the two models' logits at the end (a model too large to compute here)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes that convert, each a file at a time, with one weight in memory (default 1)",
    )
    return parser


def _add_shard_size(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        metavar="GB",
        help=f"largest safetensors file, unless one weight is larger (default {default})",
    )


def _check(options: argparse.Namespace) -> None:
    if options.workers < 1:
        raise UserError(f"--workers {options.workers} must be at least 1")
    if options.max_shard_gb is not None and not 0 < options.max_shard_gb < math.inf:
        raise UserError(f"--max-shard-gb {options.max_shard_gb} must be a number above 0; use 5 for 5 GB")
