"""Command lines of ``tools/convert_from_hf.py`` and ``tools/convert_to_hf.py``."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from megatron_aha.hf.dtypes import DTYPES, parse_dtype


def convert_from_hf(argv: Sequence[str]) -> None:
    """Imports a Hugging Face folder or a GGUF file as a checkpoint that training can start from."""
    parser = _parser("convert_from_hf.py", convert_from_hf.__doc__)
    parser.add_argument(
        "--source", required=True, metavar="PATH", help="Hugging Face folder, or a .gguf file"
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="checkpoint folder to write")
    options = parser.parse_args(argv)
    dtype = parse_dtype(options.dtype)
    from megatron_aha.hf.importer import import_checkpoint

    import_checkpoint(options.source, options.output, dtype=dtype, check=not options.skip_logits_check)


def convert_to_hf(argv: Sequence[str]) -> None:
    """Exports a checkpoint as a folder that transformers loads, with tokenizer and modelling code."""
    parser = _parser("convert_to_hf.py", convert_to_hf.__doc__)
    parser.add_argument(
        "--checkpoint", required=True, metavar="FOLDER", help="run folder (its latest step), or a step folder"
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="Hugging Face folder to write")
    parser.add_argument(
        "--max-shard-gb", type=float, default=5.0, metavar="GB", help="largest safetensors file (default 5)"
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
    if options.max_shard_gb <= 0:
        parser.error(f"--max-shard-gb {options.max_shard_gb} must be above 0")
    from megatron_aha.hf.exporter import export_checkpoint

    export_checkpoint(
        options.checkpoint,
        options.output,
        dtype=dtype,
        shard_bytes=int(options.max_shard_gb * 10**9),
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
    return parser
