#!/usr/bin/env python3
"""Writes task files for lm-evaluation-harness that need no download, for --tasks-dir of tools/evaluate.py."""

from __future__ import annotations

import sys

from megatron_aha.entry import run_and_exit
from megatron_aha.evaluation.offline import main

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
