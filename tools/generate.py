#!/usr/bin/env python3
"""Continues a prompt with a Hugging Face model or a checkpoint of ours, and prints the usage of full attention."""

from __future__ import annotations

import sys

from megatron_aha.entry import run_and_exit
from megatron_aha.hf.generate import main

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
