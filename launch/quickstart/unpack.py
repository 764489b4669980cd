"""The quickstart's first step: SmolLM2's GGUF file as the Hugging Face folder that a user would start from."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main() -> None:
    """Writes weights in fp32, configuration and tokenizer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True, help="the file to unpack")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    logging.disable_progress_bar()
    # transformers parses the file once each for configuration, weights and tokenizer, and makes the table of tensor
    # names once a module: a minute of Python in all, most of it the same again.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)

    location = {"pretrained_model_name_or_path": options.gguf.parent, "gguf_file": options.gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
    # transformers would refuse to save what it calls quantised; it is plain fp32 by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None
    model.save_pretrained(options.output)
    AutoTokenizer.from_pretrained(**location).save_pretrained(options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
