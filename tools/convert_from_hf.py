#!/usr/bin/env python3
"""Imports a Hugging Face folder or a GGUF file as a checkpoint that training can start from."""

from __future__ import annotations

import sys

from megatron_aha.entry import run_and_exit
from megatron_aha.hf.cli import convert_from_hf

if __name__ == "__main__":
    run_and_exit(convert_from_hf, sys.argv[1:])
