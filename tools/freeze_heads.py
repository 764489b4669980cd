#!/usr/bin/env python3
"""Turns heads that hardly use full attention into static sliding-window heads, whose cache is smaller."""

from __future__ import annotations

import sys

from megatron_aha.entry import run_and_exit
from megatron_aha.evaluation.freeze import main

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
