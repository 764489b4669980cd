"""A model to use, with its tokenizer: from a Hugging Face folder, a GGUF file, or a checkpoint of ours."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_aha.errors import UserError
from megatron_aha.hf import exported
from megatron_aha.hf.code import model_class
from megatron_aha.hf.families import FAMILIES
from megatron_aha.hf.source import CONFIG_FILE, open_source, read_json

# What computes attention; flash-attn and flex-attention take no masks of ours.
ATTENTIONS = ("eager", "sdpa", "aha_kernels")


@dataclass
class LoadedModel:
    """A model that is ready to compute.

    Args:
        name: how it was named on the command line.
        model: transformers' model, in evaluation mode.
        tokenizer: its tokenizer, None where the folder has none.
    """

    name: str
    model: Any
    tokenizer: Any

    @property
    def routed(self) -> bool:
        """Whether it has routers."""
        return hasattr(self.model.config, "aha_window")

    def needed_tokenizer(self) -> Any:
        """Returns the tokenizer. Raises UserError when there is none."""
        if self.tokenizer is None:
            raise UserError(f"{self.name} has no tokenizer; copy that of its base model into the folder")
        return self.tokenizer


def load_model(
    path: str | Path,
    *,
    option: str = "--model",
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    device: str | None = None,
    say: Callable[[str], None] = print,
) -> LoadedModel:
    """Loads a model; no code of the folder runs, families with routers come from this package.

    Args:
        path: Hugging Face folder, ``.gguf`` file, or run or step folder of a checkpoint of ours, which is exported
            to a temporary folder first.
        option: of the command line, for messages.
        dtype: of the weights; None keeps that of the folder.
        attention: one of ``ATTENTIONS``; None leaves it to transformers.
        device: ``cpu``, ``cuda``; None takes a GPU where there is one.
        say: told what is exported.

    Raises:
        UserError: nothing that can be loaded is there, the model has no such attention, or the machine no such
            device.
    """
    path = Path(path)
    place = _place(device)
    if path.is_dir() and not (path / CONFIG_FILE).exists():
        from megatron_aha.hf.exporter import export_checkpoint

        with tempfile.TemporaryDirectory(prefix="megatron_aha-") as scratch:
            folder = export_checkpoint(path, Path(scratch, "hf"), check=False, say=say)
            loaded = _load_folder(folder, dtype, attention)
    elif path.is_dir():
        loaded = _load_folder(path, dtype, attention)
    elif path.is_file():
        loaded = _reference(path, dtype, attention)
    else:
        raise UserError(
            f"{option}: there is no '{path}'; give a Hugging Face folder, a .gguf file or a checkpoint of ours"
        )
    return LoadedModel(str(path), loaded[0].to(place).eval(), loaded[1])


def _place(device: str | None) -> str:
    """Returns where a model goes. Raises UserError when there is no such place, before anything is loaded."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise UserError(f"--device {device} is neither cpu nor cuda (or cuda:1 for the second GPU)")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.type == "cuda" and (place.index or 0) >= gpus:
        raise UserError(
            f"--device {device}, but torch {torch.__version__} finds {gpus} GPUs here; use --device cpu"
        )
    return device


def _load_folder(folder: Path, dtype: torch.dtype | None, attention: str | None) -> tuple[Any, Any]:
    from megatron_aha.hf.faolmo import MODEL_TYPE

    if read_json(folder / CONFIG_FILE).get("model_type") == MODEL_TYPE:
        return _reference(folder, dtype, attention)
    from transformers import AutoModelForCausalLM

    register_families()
    options = {} if attention is None else {"attn_implementation": attention}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", local_files_only=True, trust_remote_code=False, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"transformers cannot load '{folder}': {error}") from error
    return model, _tokenizer(folder)


def _reference(path: Path, dtype: torch.dtype | None, attention: str | None) -> tuple[Any, Any]:
    """Returns what our own reading of a file or of the authors' format gives, and its tokenizer."""
    register_families()
    model = open_source(path).reference()
    if attention is not None:
        model.set_attn_implementation(attention)
    return model if dtype is None else model.to(dtype), _tokenizer(path)


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    if path.is_file():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if not any((path / name).exists() for name in ("tokenizer_config.json", "tokenizer.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"transformers cannot load the tokenizer of '{path}': {error}") from error


def register_families() -> None:
    """Tells transformers' Auto classes of every family with routers, so that they need no code of a folder."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    for name, family in FAMILIES.items():
        causal = model_class(name)
        decoder = getattr(
            importlib.import_module(f"{exported.__name__}.modeling_{name}_aha"), f"{family.prefix}AHAModel"
        )
        AutoConfig.register(f"{name}_aha", causal.config_class, exist_ok=True)
        AutoModel.register(causal.config_class, decoder, exist_ok=True)
        AutoModelForCausalLM.register(causal.config_class, causal, exist_ok=True)
