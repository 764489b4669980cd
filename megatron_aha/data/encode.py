"""From raw records to token ids: what a worker process of preprocessing does. Imports no torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_aha.data.sources import Chunk, RawRecord
from megatron_aha.errors import nearest
from megatron_aha.worker import end_with_parent

if TYPE_CHECKING:
    from megatron_aha.hf.tokenizer import TextTokenizer


@dataclass(frozen=True)
class BadRecord:
    """A record that is no document: where it is and what is wrong with it."""

    where: str
    reason: str


@dataclass(frozen=True)
class EncodedChunk:
    """Documents of a chunk as ids.

    Args:
        ids: int32 ``[tokens]``, all documents end to end, each with its end-of-document id.
        lengths: tokens of each document.
        empty: documents without text, left out.
        eod_inside: documents whose text spells the end-of-document token, so that they count as several.
        bad: records that are no documents, in order.
        bytes_read: bytes of the input file that the chunk came from.
    """

    ids: np.ndarray
    lengths: list[int]
    empty: int
    eod_inside: int
    bad: list[BadRecord]
    bytes_read: int


class Encoder:
    """Encodes chunks.

    Args:
        tokenizer: the tokenizer.
        json_key: key of the text in JSON lines.
    """

    def __init__(self, tokenizer: TextTokenizer, json_key: str) -> None:
        self._tokenizer = tokenizer
        self._json_key = json_key

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """Returns the documents of a chunk as ids, and what was wrong with the others."""
        texts: list[str] = []
        bad: list[BadRecord] = []
        empty = 0
        for record in chunk.records:
            where = str(chunk.file.path) if record.line is None else f"{chunk.file.path}, line {record.line}"
            try:
                text = self._text(record, chunk.file.is_jsonl)
            except (ValueError, RecursionError) as error:
                bad.append(BadRecord(where, str(error)))
                continue
            if text.strip():
                texts.append(text)
            else:
                empty += 1
        eod = self._tokenizer.record.eod_id
        documents = [np.array([*ids, eod], dtype=np.int32) for ids in self._tokenizer.encode_batch(texts)]
        return EncodedChunk(
            ids=np.concatenate(documents) if documents else np.zeros(0, dtype=np.int32),
            lengths=[len(document) for document in documents],
            empty=empty,
            eod_inside=sum(1 for document in documents if (document[:-1] == eod).any()),
            bad=bad,
            bytes_read=chunk.bytes_read,
        )

    def _text(self, record: RawRecord, is_jsonl: bool) -> str:
        """The record's text; a ValueError says what is wrong with it."""
        try:
            text = record.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"not UTF-8: byte 0x{record.data[error.start]:02x} at offset {error.start}"
            ) from None
        if not is_jsonl:
            return text
        try:
            page = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
        if not isinstance(page, dict):
            raise ValueError(f"a JSON {_json_type(page)}, not an object with the key '{self._json_key}'")
        if self._json_key not in page:
            raise ValueError(f"no key '{self._json_key}'{nearest(self._json_key, page)}")
        value = page[self._json_key]
        if not isinstance(value, str):
            raise ValueError(f"the value of '{self._json_key}' is a JSON {_json_type(value)}, not a string")
        # Half of a surrogate pair is valid in JSON but no Unicode text: it becomes U+FFFD.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _json_type(value: object) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return names.get(type(value), "null")


_encoder: Encoder | None = None


def start_worker(encoder: Encoder) -> None:
    """Prepares a worker process: one thread each, and no life beyond the parent's."""
    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_parent()


def encode_in_worker(chunk: Chunk) -> EncodedChunk:
    """Encodes one chunk in a process prepared by :func:`start_worker`."""
    assert _encoder is not None, "start_worker has not run in this process"
    return _encoder.encode(chunk)
