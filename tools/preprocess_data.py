#!/usr/bin/env python3
"""Turns text into a Megatron-core dataset: PREFIX.bin, PREFIX.idx, and PREFIX.json that describes them."""

from __future__ import annotations

from megatron_aha.data.preprocess_cli import main

if __name__ == "__main__":
    raise SystemExit(main())
