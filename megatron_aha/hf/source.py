"""Where weights come from: a Hugging Face folder with safetensors, or what else ``open_source`` knows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_aha.checkpoint.index import INDEX_FILE, LATEST_FILE
from megatron_aha.checkpoint.tensor_file import TYPE_NAMES
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.errors import UserError
from megatron_aha.hf.code import model_class
from megatron_aha.hf.configuration import read_config

# Element types by the names of safetensors files.
_TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
CARD_FILE = "README.md"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

# Everything of a source that an export must be able to give back beside weights.
CARRIED_FILES = (
    CONFIG_FILE,
    GENERATION_FILE,
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*",
    CARD_FILE,
    "LICENSE*",
    "NOTICE*",
)


class Source(Protocol):
    """A model to import; its configuration was read, or refused, before its weights were touched."""

    config: dict[str, Any]
    model: ModelConfig
    aha: AHAConfig | None

    def names(self) -> Sequence[str]:
        """Returns the names of all weights."""

    def outline(self, name: str) -> Tensor:
        """Returns a tensor of a weight's shape and type on the meta device, without reading the weight."""

    def read(self, name: str) -> Tensor:
        """Returns one weight as it is stored."""

    def files(self) -> Sequence[Path]:
        """Returns all files on which the weights depend, beside the configuration."""

    def carry(self, folder: Path) -> None:
        """Writes tokenizer, chat template, generation config and config into an empty folder."""

    def reference(self) -> Any:
        """Returns transformers' own model in fp32, for the logits check."""


class FolderSource:
    """A folder as ``save_pretrained`` writes it.

    Raises:
        UserError: config or weights are missing, the index names files or tensors that are not there, or the
            configuration is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read_config(read_json(folder / CONFIG_FILE))
        self._files = self._locate()

    def _read_config(self, config: dict[str, Any]) -> None:
        self.config = config
        self.model, self.aha = read_config(config)

    def _locate(self) -> dict[str, str]:
        """Returns the file of each weight."""
        single, index = self.folder / WEIGHTS_FILE, self.folder / WEIGHTS_INDEX
        if index.exists():
            located = dict(read_json(index)["weight_map"])
        elif single.exists():
            with open_shard(single) as handle:
                return dict.fromkeys(handle.keys(), WEIGHTS_FILE)
        else:
            others = sorted(path.name for path in self.folder.glob("*.bin"))
            found = (
                f"; {others[0]} is a pickle, which is not read: convert it with safetensors" if others else ""
            )
            raise UserError(f"{self.folder} holds neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX}{found}")
        for file in sorted(set(located.values())):
            if not (self.folder / file).is_file():
                raise UserError(f"{index} names {file}, which is missing: download or copy the folder again")
            with open_shard(self.folder / file) as handle:
                held = set(handle.keys())
            lacking = sorted(name for name, where in located.items() if where == file and name not in held)
            if lacking:
                raise UserError(f"{index} says that {file} holds '{lacking[0]}', but it does not")
        return located

    def names(self) -> Sequence[str]:
        return list(self._files)

    def outline(self, name: str) -> Tensor:
        stored = self._open(name).get_slice(name)
        kind = _TYPES.get(stored.get_dtype())
        if kind is None:
            raise UserError(
                f"the source's '{name}' has the type {stored.get_dtype()}, which is not supported"
            )
        return torch.empty(stored.get_shape(), dtype=kind, device="meta")

    def read(self, name: str) -> Tensor:
        return self._open(name).get_tensor(name)

    def _open(self, name: str) -> Any:
        """Opens a weight's file for one read: what was read of an open file counts as this process's memory."""
        return open_shard(self.folder / self._files[name])

    def files(self) -> Sequence[Path]:
        stored = [self.folder / file for file in sorted(set(self._files.values()))]
        index = self.folder / WEIGHTS_INDEX
        return [index, *stored] if index.exists() else stored

    def carry(self, folder: Path) -> None:
        for pattern in CARRIED_FILES:
            for path in sorted(self.folder.glob(pattern)):
                target = folder / path.relative_to(self.folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)

    def reference(self) -> Any:
        from transformers import AutoModelForCausalLM

        # Our own code for our own architecture: a folder's code is not run to import its weights.
        if self.aha is not None:
            kind = model_class(self.model.family)
            # not our kernels, which compute what this is compared with
            options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
            return kind.from_pretrained(self.folder, **options).eval()
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()


def open_source(path: str | Path) -> Source:
    """Returns the model at a folder, or in a ``.gguf`` file. Raises UserError when it is neither."""
    path = Path(path)
    if path.is_dir():
        if (path / LATEST_FILE).is_file() or (path / INDEX_FILE).is_file():
            raise UserError(
                f"--source {path} is a checkpoint already, which training starts from with "
                "--checkpoint.init_from; tools/convert_to_hf.py exports it"
            )
        return _open_folder(path)
    if path.is_file() and path.suffix == ".gguf":
        from megatron_aha.hf.gguf_source import GGUFSource

        return GGUFSource(path)
    what = "is neither a folder nor a .gguf file" if path.exists() else "does not exist"
    raise UserError(
        f"--source {path} {what}; give a Hugging Face folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
    )


def _open_folder(folder: Path) -> Source:
    from megatron_aha.hf.faolmo import MODEL_TYPE, FaolmoSource

    kind = read_json(folder / CONFIG_FILE).get("model_type")
    return FaolmoSource(folder) if kind == MODEL_TYPE else FolderSource(folder)


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object. Raises UserError when the file is missing or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: the folder of a Hugging Face model holds one") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__} instead of an object")
    return content


def open_shard(path: Path) -> Any:
    """Returns an open safetensors file. Raises UserError when it is damaged."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UserError(
            f"{path} ({path.stat().st_size} bytes) is no complete safetensors file: {error}"
        ) from error
