#!/usr/bin/env python3
"""Measures models side by side: perplexity by position, tasks of lm-evaluation-harness, usage of full attention."""

from __future__ import annotations

import sys

from megatron_aha.entry import run_and_exit
from megatron_aha.evaluation.cli import main

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
