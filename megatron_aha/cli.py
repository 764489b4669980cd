"""The console script ``megatron-aha``: the tools under one name, where the repository is not at hand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import megatron_aha
from megatron_aha.entry import run_and_exit
from megatron_aha.errors import UserError, nearest

# name: (module, function, what it does); imported only when called, because some take seconds to import
COMMANDS = {
    "convert-from-hf": (
        "megatron_aha.hf.cli",
        "convert_from_hf",
        "import a Hugging Face folder or GGUF file",
    ),
    "preprocess": ("megatron_aha.data.preprocess_cli", "main", "turn text into a Megatron-core dataset"),
    "pretrain": (
        "megatron_aha.training.pretrain",
        "main",
        "train; under the deepspeed launcher on several ranks",
    ),
    "convert-to-hf": ("megatron_aha.hf.cli", "convert_to_hf", "export a checkpoint for transformers"),
    "generate": (
        "megatron_aha.hf.generate",
        "main",
        "continue a prompt, and print the usage of full attention",
    ),
    "evaluate": (
        "megatron_aha.evaluation.cli",
        "main",
        "perplexity by position and harness tasks, models side by side",
    ),
    "freeze-heads": (
        "megatron_aha.evaluation.freeze",
        "main",
        "make heads that hardly look back static, for a smaller cache",
    ),
    "checkpoint": (
        "megatron_aha.checkpoint.cli",
        "main",
        "inspect, verify, reshard a checkpoint or extract its fp32 weights",
    ),
    "plot": ("megatron_aha.report.plots", "main", "draw the usage of full attention in a run"),
}


def main() -> None:
    """Runs ``megatron-aha COMMAND ...`` and leaves the process with the command's exit status."""
    run_and_exit(run, sys.argv[1:])


def run(argv: Sequence[str]) -> int | None:
    """Returns the exit status of the command that ``argv`` names, run with the arguments behind it.

    Raises:
        UserError: there is no such command.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"megatron-aha {megatron_aha.__version__}")
        return 0
    if argv[0] not in COMMANDS:
        raise UserError(
            f"megatron-aha has no command '{argv[0]}'{nearest(argv[0], COMMANDS)}; see megatron-aha --help"
        )
    module, function, _ = COMMANDS[argv[0]]
    return getattr(importlib.import_module(module), function)(argv[1:])


def _usage() -> str:
    lines = [f"  {name:<16} {purpose}" for name, (_, _, purpose) in COMMANDS.items()]
    return "\n".join(["usage: megatron-aha COMMAND [OPTION]...", "", "commands:", *lines])
