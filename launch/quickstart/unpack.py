"""The quickstart's first step: SmolLM2's GGUF file as the Hugging Face folder that a user would start from."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers.utils import logging

from megatron_aha.hf.source import open_source


def main() -> None:
    """Writes weights in fp32, configuration and tokenizer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True, help="the file to unpack")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    logging.disable_progress_bar()
    source = open_source(options.gguf)
    source.reference().save_pretrained(options.output)
    source.carry(options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
