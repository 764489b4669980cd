"""Command line of ``tools/checkpoint.py``."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_aha.errors import UserError

RESHARD = """A checkpoint loads into any layout as it is: tensor, pipeline and data parallel sizes and ZeRO stages may
change between save and load without this command. It is for the files themselves: fewer or smaller ones after a run on
many ranks, or a copy without gaps on another disk."""


def main(argv: Sequence[str]) -> int:
    """Looks into a checkpoint, checks it, or writes it anew; returns the exit status."""
    options = _parser().parse_args(argv)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="checkpoint.py", description=main.__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str, checkpoint: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text.splitlines()[0], description=text)
        made.add_argument("checkpoint", metavar="CHECKPOINT", help=checkpoint)
        made.set_defaults(run=run)
        return made

    one = "run folder (its latest step), or a step folder"
    inspect = command("inspect", _inspect, "print what a checkpoint holds", one)
    inspect.add_argument(
        "--tensors", metavar="PATTERN", help="list the tensors whose names match, such as '*.router.*'"
    )
    command(
        "verify",
        _verify,
        "compare sizes and SHA-256 of every file; exit status 1 when one is damaged",
        "run folder (all its steps), or a step folder",
    )
    for name, run, text in (
        ("reshard", _reshard, f"write it again in files of another size\n\n{RESHARD}"),
        (
            "extract-fp32",
            _extract_fp32,
            "write its weights alone, as fp32 (from the optimizer's masters where there are any)",
        ),
    ):
        made = command(name, run, text, one)
        made.add_argument("output", metavar="OUTPUT", help="run folder to write a step to")
        made.add_argument(
            "--file-gb", type=float, default=5.0, metavar="GB", help="largest file, in 10^9 bytes (default 5)"
        )
    return parser


def _inspect(options: argparse.Namespace) -> int:
    from megatron_aha.checkpoint.index import OPTIMIZER_PREFIX, RNG_PREFIX
    from megatron_aha.checkpoint.reader import CheckpointReader

    reader = CheckpointReader(options.checkpoint, checksums=False)
    if options.tensors is not None:
        for name in fnmatch.filter(reader.names(), options.tensors):
            print(f"{name}  {list(reader.shape(name))}  {str(reader.dtype(name)).removeprefix('torch.')}")
        return 0
    print(f"{reader.folder}: step {reader.step}")
    _print_section("model", dataclasses.asdict(reader.model))
    if reader.aha is None:
        print("aha: none, a dense checkpoint")
    else:
        _print_section("aha", dataclasses.asdict(reader.aha))
    if reader.state is None:
        print("training state: none, weights alone")
    else:
        _print_section("training state", reader.state)
    kinds = {
        "weights": reader.weight_names(),
        "optimizer": reader.names(OPTIMIZER_PREFIX),
        "random states": reader.names(RNG_PREFIX),
    }
    for kind, names in kinds.items():
        elements = sum(math.prod(reader.shape(name)) for name in names)
        size = sum(math.prod(reader.shape(name)) * reader.dtype(name).itemsize for name in names)
        types = ", ".join(sorted({str(reader.dtype(name)).removeprefix("torch.") for name in names}))
        print(f"{kind}: {len(names)} tensors, {elements:,} elements, {size:,} bytes {types}")
    print(f"carried along: {reader.source_dir or 'nothing'}")
    return 0


def _print_section(title: str, values: dict[str, object]) -> None:
    print(f"{title}: {json.dumps(values)}")


def _verify(options: argparse.Namespace) -> int:
    from megatron_aha.checkpoint.reader import CheckpointReader, step_folders

    folders = step_folders(Path(options.checkpoint)) or [Path(options.checkpoint)]
    damaged = 0
    for folder in folders:
        try:
            CheckpointReader(folder, checksums=False).verify()
            print(f"{folder}: whole")
        except UserError as error:
            damaged += 1
            print(f"{folder}: {error}", file=sys.stderr)
    return 1 if damaged else 0


def _reshard(options: argparse.Namespace) -> int:
    from megatron_aha.checkpoint.reader import CheckpointReader
    from megatron_aha.checkpoint.rewrite import reshard

    print(reshard(CheckpointReader(options.checkpoint), options.output, _file_bytes(options)))
    return 0


def _extract_fp32(options: argparse.Namespace) -> int:
    from megatron_aha.checkpoint.reader import CheckpointReader
    from megatron_aha.checkpoint.rewrite import extract_fp32

    print(extract_fp32(CheckpointReader(options.checkpoint), options.output, _file_bytes(options)))
    return 0


def _file_bytes(options: argparse.Namespace) -> int:
    if not 0 < options.file_gb < math.inf:
        raise UserError(f"--file-gb is {options.file_gb}, and must be a number above 0; use 5 for 5 GB")
    return max(int(options.file_gb * 10**9), 1)
