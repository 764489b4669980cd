#!/usr/bin/env python3
"""Exports a checkpoint as a folder that transformers loads, with tokenizer and modelling code."""

from __future__ import annotations

import sys

from megatron_aha.entry import run_and_exit
from megatron_aha.hf.cli import convert_to_hf

if __name__ == "__main__":
    run_and_exit(convert_to_hf, sys.argv[1:])
