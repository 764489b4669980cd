"""From raw records to token ids: what a worker process of preprocessing does. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_aha.data.record_text import record_text
from megatron_aha.data.sources import Chunk
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
        ids: int32 ``[tokens]``, all documents end to end, each with its beginning- and end-of-document ids.
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
                text = record_text(record, chunk.file.is_jsonl, self._json_key)
            except (ValueError, RecursionError) as error:
                bad.append(BadRecord(where, str(error)))
                continue
            if text.strip():
                texts.append(text)
            else:
                empty += 1
        made_by = self._tokenizer.record
        eod = made_by.eod_id
        begin = [] if made_by.bos_id is None else [made_by.bos_id]
        documents = [
            np.array([*begin, *ids, eod], dtype=np.int32) for ids in self._tokenizer.encode_batch(texts)
        ]
        return EncodedChunk(
            ids=np.concatenate(documents) if documents else np.zeros(0, dtype=np.int32),
            lengths=[len(document) for document in documents],
            empty=empty,
            eod_inside=sum(1 for document in documents if (document[:-1] == eod).any()),
            bad=bad,
            bytes_read=chunk.bytes_read,
        )


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
