"""Finds the input files of preprocessing and cuts them into raw records, without decoding anything yet."""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from megatron_aha.errors import UserError

FORMATS = ("auto", "jsonl", "text")
_JSON_LINES = (".jsonl", ".ndjson")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Small enough to keep all workers busy, large enough to make the transport of records cheap.
_CHUNK_BYTES = 1 << 18
_CHUNK_RECORDS = 512


@dataclass(frozen=True)
class InputFile:
    """A file of text: JSON lines, or one document."""

    path: Path
    is_jsonl: bool


@dataclass(frozen=True)
class RawRecord:
    """Bytes that should hold one document; ``line`` counts from 1 and is None for a whole file."""

    data: bytes
    line: int | None


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of one file.

    Args:
        file: where they come from.
        records: the records, in the file's order.
        bytes_read: bytes of the file, as stored, that were read since the chunk before.
    """

    file: InputFile
    records: tuple[RawRecord, ...]
    bytes_read: int


def find_inputs(patterns: Sequence[str], file_format: str, option: str = "--input") -> list[InputFile]:
    """Returns the files that paths, directories (searched recursively, hidden files left out) and globs name.

    Args:
        patterns: what the user wrote; the order is kept, within a directory or glob files are sorted by name.
        file_format: ``jsonl``, ``text``, or ``auto``: JSON lines by the ending .jsonl or .ndjson (also with
            .gz).
        option: of the command line, for messages.

    Raises:
        UserError: a pattern names nothing, or its format cannot be told.
    """
    found: list[InputFile] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.is_file() and not _hidden(file, path)]
        elif path.is_file():
            files = [path]
        else:
            files = [
                Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()
            ]
        if not files:
            what = "directory has no files" if path.is_dir() else "no such file, directory or glob match"
            raise UserError(f"{option} '{pattern}': {what}")
        found.extend(
            InputFile(file, _is_jsonl(file, file_format, in_directory=path.is_dir())) for file in files
        )
    return found


def read_chunks(file: InputFile) -> Iterator[Chunk]:
    """Yields the records of one file in order, several at a time.

    JSON lines end at a line feed only: other characters that some readers take for line ends may stand in a
    text. Lines of white space are no records.

    Raises:
        UserError: the file cannot be read or its gzip data is damaged, with its name.
    """
    try:
        with open(file.path, "rb") as raw:
            stream = _unpacked(raw, file.path)
            reported = 0
            for records in _chunked(_lines(stream)) if file.is_jsonl else [(_whole(stream),)]:
                position = raw.tell()
                yield Chunk(file, records, position - reported)
                reported = position
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"'{file.path}' cannot be read: {error}") from error


def _unpacked(raw: BinaryIO, path: Path) -> IO[bytes]:
    """The bytes behind a file; ``raw`` itself stays open, so that it can tell how far reading has come."""
    return cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw


def _whole(stream: IO[bytes]) -> RawRecord:
    return RawRecord(stream.read().removeprefix(_BYTE_ORDER_MARK), None)


def _lines(stream: IO[bytes]) -> Iterator[RawRecord]:
    for number, line in enumerate(stream, start=1):
        data = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        if data.strip():
            yield RawRecord(data, number)


def _chunked(records: Iterator[RawRecord]) -> Iterator[tuple[RawRecord, ...]]:
    chunk: list[RawRecord] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += len(record.data)
        if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_RECORDS:
            yield tuple(chunk)
            chunk, size = [], 0
    if chunk:
        yield tuple(chunk)


def _is_jsonl(path: Path, file_format: str, *, in_directory: bool) -> bool:
    if file_format != "auto":
        return file_format == "jsonl"
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix == ".json" and not in_directory:
        raise UserError(
            f"--input '{path}': a .json file may be JSON lines or plain text; say --format jsonl or "
            "--format text"
        )
    return suffix in _JSON_LINES


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)
