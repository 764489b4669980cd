#!/usr/bin/env python3
"""Looks into a checkpoint, checks it, or writes it anew: inspect, verify, reshard, extract-fp32."""

from __future__ import annotations

import sys

from megatron_aha.checkpoint.cli import main
from megatron_aha.entry import run_and_exit

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
