#!/usr/bin/env python3
"""Turns text into a Megatron-core dataset: PREFIX.bin, PREFIX.idx, and PREFIX.json that describes them."""

from __future__ import annotations

import sys

from megatron_aha.data.preprocess_cli import main
from megatron_aha.entry import run_and_exit

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
