#!/usr/bin/env python3
"""Draws the usage of full attention in a run: heat map, layers, heads by usage, and curves over the steps."""

from __future__ import annotations

import sys

from megatron_aha.entry import run_and_exit
from megatron_aha.report.plots import main

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
