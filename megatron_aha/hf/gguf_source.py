"""Weights out of a GGUF file, which transformers parses and dequantises."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron_aha.errors import UserError
from megatron_aha.hf.configuration import read_config


class _ParsedOnce:
    """While entered, transformers gets a file's reader and its table of tensor names from a cache.

    It parses the file once each for configuration, weights and tokenizer, and makes the table once a module: a
    minute of Python in all for a small model, most of it the same again.

    Raises:
        ImportError: the package gguf is not installed.
    """

    def __init__(self) -> None:
        import gguf

        self._module: Any = gguf
        self._originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
        self._cached = {name: functools.cache(original) for name, original in self._originals.items()}

    def __enter__(self) -> None:
        for name, cached in self._cached.items():
            setattr(self._module, name, cached)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, original in self._originals.items():
            setattr(self._module, name, original)


class GGUFSource:
    """A GGUF file, dequantised to fp32 by transformers, which needs the packages gguf and accelerate.

    Raises:
        UserError: such a package is missing, or the configuration is not supported.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            import accelerate  # noqa: F401

            self._parsed_once = _ParsedOnce()
        except ImportError as error:
            raise UserError(
                f"reading {file.name} needs the package {error.name}: pip install 'megatron-aha[gguf]'"
            ) from error
        with self._parsed_once:
            self._model = self._load()
        self.config = self._model.config.to_dict()
        weights = dict(self._model.named_parameters())
        self._weights = {name: weight.detach() for name, weight in weights.items()}

    def _load(self) -> Any:
        """Returns transformers' model in fp32 and reads its configuration."""
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        location = {"pretrained_model_name_or_path": self.file.parent, "gguf_file": self.file.name}
        config = AutoConfig.from_pretrained(**location)
        # a GGUF file names the kind of model only
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)]
        config_values = {**config.to_dict(), "quantization_config": None}
        self.model, self.aha = read_config(config_values)
        # Given the configuration, transformers does not parse the file's vocabulary for it a second time.
        model = AutoModelForCausalLM.from_pretrained(**location, config=config, dtype=torch.float32)
        # transformers would refuse to save what it calls quantised; it is plain fp32 by now
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.is_quantized = False
        model.hf_quantizer = None
        return model.eval()

    def names(self) -> Sequence[str]:
        return list(self._weights)

    def outline(self, name: str) -> Tensor:
        return self._weights[name].to("meta")

    def read(self, name: str) -> Tensor:
        return self._weights[name]

    def files(self) -> Sequence[Path]:
        return [self.file]

    def carry(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        with self._parsed_once:
            tokenizer = AutoTokenizer.from_pretrained(self.file.parent, gguf_file=self.file.name)
        tokenizer.save_pretrained(folder)
        self._model.config.save_pretrained(folder)
        self._model.generation_config.save_pretrained(folder)

    def reference(self) -> Any:
        return self._model
