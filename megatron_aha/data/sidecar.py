"""The page beside every dataset: who made it, what is in it, and checksums that tell whether it is whole."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from megatron_aha.errors import UserError

FORMAT = "megatron_aha-dataset"
VERSION = 1


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 (hexadecimal) of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TokenizerRecord:
    """Which tokenizer made the ids.

    Args:
        kind: ``huggingface`` or ``sentencepiece``.
        name: the path it was loaded from, for people; two paths may hold the same tokenizer.
        sha256: digest of the vocabulary, added tokens included, and of a probe text's ids: equal for
            tokenizers that give the same ids, wherever they lie.
        vocab_size: ids it can give, added tokens included.
        eod_id: id that ends every document.
        eod_token: text of that id.
        bos_id: id that begins every document; None where none does.
        bos_token: text of that id.
    """

    kind: str
    name: str
    sha256: str
    vocab_size: int
    eod_id: int
    eod_token: str
    bos_id: int | None = None
    bos_token: str | None = None

    def documents_look_as(self, other: TokenizerRecord) -> bool:
        """Returns whether the other makes the same ids of a document."""
        return (self.sha256, self.eod_id, self.bos_id) == (other.sha256, other.eod_id, other.bos_id)


@dataclass(frozen=True)
class Sidecar:
    """Contents of ``PREFIX.json``, written after ``PREFIX.bin`` and ``PREFIX.idx`` are complete.

    Args:
        tokenizer: the tokenizer.
        dtype: NumPy name of the type of one id in the .bin file.
        documents: documents in the dataset.
        tokens: ids in the dataset, end-of-document ids included.
        largest_id: largest id in the dataset.
        bin: record of the .bin file.
        idx: record of the .idx file.
        source: how it was made: inputs with their checksums, options, and counts of what was left out.
    """

    tokenizer: TokenizerRecord
    dtype: str
    documents: int
    tokens: int
    largest_id: int
    bin: FileRecord
    idx: FileRecord
    source: dict[str, Any] = field(default_factory=dict)


def hash_file(path: Path) -> FileRecord:
    """Returns size and SHA-256 of a file, read in blocks."""
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return FileRecord(bytes=stream.tell(), sha256=digest.hexdigest())


def sidecar_path(prefix: str) -> Path:
    """Returns where the sidecar of a dataset lies."""
    return Path(f"{prefix}.json")


def write_sidecar(prefix: str, sidecar: Sidecar) -> None:
    """Writes ``PREFIX.json`` at once: a reader sees the old page, none, or the whole new one."""
    path = sidecar_path(prefix)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    page = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(sidecar)}
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(page, stream, indent=2, ensure_ascii=True)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def read_sidecar(prefix: str) -> Sidecar:
    """Returns the sidecar of a dataset.

    Raises:
        UserError: there is none, or it is not one of ours.
    """
    path = sidecar_path(prefix)
    if not path.is_file():
        raise UserError(
            f"dataset '{prefix}' has no '{path}': either its preprocessing was interrupted or another tool "
            "made it; run tools/preprocess_data.py again"
        )
    try:
        page = json.loads(path.read_text(encoding="utf-8"))
        if page["format"] != FORMAT:
            raise UserError(f"'{path}' has format '{page['format']}', expected '{FORMAT}'")
        if page["version"] != VERSION:
            raise UserError(f"'{path}' has version {page['version']}, this program reads version {VERSION}")
        return Sidecar(
            tokenizer=TokenizerRecord(**page["tokenizer"]),
            dtype=page["dtype"],
            documents=page["documents"],
            tokens=page["tokens"],
            largest_id=page["largest_id"],
            bin=FileRecord(**page["bin"]),
            idx=FileRecord(**page["idx"]),
            source=page["source"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"'{path}' is not a dataset's description ({type(error).__name__}: {error}); "
            "run tools/preprocess_data.py again"
        ) from error


def check_files(prefix: str, sidecar: Sidecar, *, contents: bool, up_to: float = inf) -> None:
    """Compares the .bin and .idx files with what the sidecar says about them.

    Args:
        prefix: the dataset.
        sidecar: what it should be.
        contents: compare checksums too; otherwise sizes only.
        up_to: with ``contents``, larger files are compared by size only, in bytes: hashing them would take
            minutes.

    Raises:
        UserError: a file is missing, cut, longer, or another one, with both values.
    """
    for suffix, expected in ((".bin", sidecar.bin), (".idx", sidecar.idx)):
        path = Path(prefix + suffix)
        if not path.is_file():
            raise UserError(f"'{path}' is missing, though '{sidecar_path(prefix)}' describes it")
        size = path.stat().st_size
        if size != expected.bytes:
            raise UserError(
                f"'{path}' has {size} bytes, but '{sidecar_path(prefix)}' says {expected.bytes}: it was cut "
                "or replaced; run tools/preprocess_data.py again"
            )
        if contents and size <= up_to:
            found = hash_file(path)
            if found.sha256 != expected.sha256:
                raise UserError(
                    f"'{path}' has {found.bytes} bytes as expected ({expected.bytes}), but its SHA-256 is "
                    f"{found.sha256[:16]}..., not {expected.sha256[:16]}...: it belongs to another dataset "
                    "or was changed; run tools/preprocess_data.py again"
                )
