#!/usr/bin/env python3
"""Writes the table of layouts into docs/parallelism.md from the rules that validate a configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_aha.entry import run_and_exit
from megatron_aha.report.layout_table import write_into

PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"


def main(argv: Sequence[str]) -> int:
    """Writes the table and says whether it changed; returns the exit status."""
    parser = argparse.ArgumentParser(prog="layout_table.py", description=__doc__)
    parser.add_argument("page", nargs="?", default=PAGE, type=Path, help="Markdown file with the two marks")
    page = parser.parse_args(argv).page
    print(f"{page}: {'written anew' if write_into(page) else 'was up to date'}")
    return 0


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
