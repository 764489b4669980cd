"""Text in, Megatron-core dataset out: the pool of workers, the progress bar, and what is left out."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from megatron_aha.data.encode import EncodedChunk, Encoder, encode_in_worker, start_worker
from megatron_aha.data.sidecar import Sidecar, check_files, hash_file, read_sidecar, sidecar_path
from megatron_aha.data.sources import Chunk, InputFile, find_inputs, read_chunks
from megatron_aha.data.writer import DatasetWriter
from megatron_aha.errors import UserError

if TYPE_CHECKING:
    from megatron_aha.hf.tokenizer import TextTokenizer

# Chunks in flight per worker: enough that none waits, few enough that memory does not grow with the input.
_CHUNKS_PER_WORKER = 4
# A process costs about as much to start as these bytes cost to tokenize.
_BYTES_PER_WORKER = 1 << 20
_COMPLAINTS_SHOWN = 10


@dataclass(frozen=True)
class PreprocessOptions:
    """What to read and how.

    Args:
        inputs: files, directories and globs.
        output: prefix of the dataset.
        file_format: ``auto``, ``jsonl`` or ``text``.
        json_key: key of the text in JSON lines.
        on_error: ``stop`` at the first record that is no document, or ``skip`` and count them.
        workers: processes that tokenize, fewer for inputs of few MiB; 1 works in this process.
        overwrite: replace .bin and .idx files that lack a sidecar, which another tool may have made.
    """

    inputs: tuple[str, ...]
    output: str
    file_format: str = "auto"
    json_key: str = "text"
    on_error: str = "stop"
    workers: int = 1
    overwrite: bool = False


@dataclass
class _Counts:
    """What was left out, for the sidecar."""

    bad_records: int = 0
    empty_documents: int = 0
    documents_with_eod_inside: int = 0


def preprocess(
    options: PreprocessOptions, tokenizer: TextTokenizer, say: Callable[[str], None] = print
) -> Sidecar:
    """Tokenizes the inputs into one dataset, or finds that it is already there.

    Args:
        options: what to read and how.
        tokenizer: the tokenizer; its beginning- and end-of-document ids frame every document.
        say: receives one line at a time for the user.

    Returns:
        The dataset's sidecar.

    Raises:
        UserError: an input or the output cannot be used, or a record is no document and ``on_error`` is
            ``stop``.
    """
    files = find_inputs(options.inputs, options.file_format)
    source = _describe(files, options)
    existing = _existing(options, source, tokenizer, say)
    if existing is not None:
        return existing
    counts = _Counts()
    try:
        with DatasetWriter(options.output, tokenizer.record) as writer:
            for chunk in _encoded(files, Encoder(tokenizer, options.json_key), options.workers):
                _add(writer, chunk, counts, options.on_error, say)
            sidecar = writer.finish({**source, "left_out": vars(counts)})
    except OSError as error:
        raise UserError(f"--output '{options.output}' cannot be written: {error}") from error
    _report(sidecar, counts, options, say)
    return sidecar


def _describe(files: list[InputFile], options: PreprocessOptions) -> dict[str, Any]:
    """What the dataset is a function of, besides the tokenizer: equal descriptions give equal datasets."""
    inputs = []
    for file in tqdm(files, desc="checksums", unit="file", leave=False):
        record = hash_file(file.path)
        inputs.append(
            {"name": str(file.path), "jsonl": file.is_jsonl, "bytes": record.bytes, "sha256": record.sha256}
        )
    return {"inputs": inputs, "json_key": options.json_key, "on_error": options.on_error}


def _existing(
    options: PreprocessOptions, source: dict[str, Any], tokenizer: TextTokenizer, say: Callable[[str], None]
) -> Sidecar | None:
    """The dataset under the prefix when it is whole and just what would be made; says why it is not."""
    prefix = options.output
    if prefix.endswith((".bin", ".idx", ".json")) or Path(prefix).is_dir():
        raise UserError(f"--output '{prefix}' must be a prefix without ending, such as 'data/corpus'")
    if not sidecar_path(prefix).exists():
        present = [prefix + suffix for suffix in (".bin", ".idx") if Path(prefix + suffix).exists()]
        if present and not options.overwrite:
            raise UserError(
                f"--output: '{present[0]}' exists without '{sidecar_path(prefix)}', so another tool may "
                "have made it; name another prefix, or replace it with --overwrite"
            )
        return None
    try:
        sidecar = read_sidecar(prefix)
        check_files(prefix, sidecar, contents=True)
    except UserError as error:
        say(f"making it again: {error}")
        return None
    made_from = {key: value for key, value in sidecar.source.items() if key != "left_out"}
    same_tokenizer = sidecar.tokenizer.documents_look_as(tokenizer.record)
    if same_tokenizer and made_from == source:
        say(f"already there: '{prefix}' with {sidecar.documents} documents, {sidecar.tokens} tokens")
        return sidecar
    what = "inputs or options" if same_tokenizer else "tokenizer, or beginning- or end-of-document token"
    say(f"making it again: '{prefix}' was made with other {what}")
    return None


def _encoded(files: list[InputFile], encoder: Encoder, workers: int) -> Iterator[EncodedChunk]:
    """The documents of all files, in order, however many processes work on them."""
    chunks = (chunk for file in files for chunk in read_chunks(file))
    total = sum(file.path.stat().st_size for file in files)
    workers = min(workers, 1 + total // _BYTES_PER_WORKER)
    with tqdm(total=total, desc="tokenizing", unit="B", unit_scale=True, mininterval=0.5) as bar:
        for encoded in _in_process(chunks, encoder) if workers == 1 else _in_pool(chunks, encoder, workers):
            bar.update(encoded.bytes_read)
            yield encoded


def _in_process(chunks: Iterator[Chunk], encoder: Encoder) -> Iterator[EncodedChunk]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return map(encoder.encode, chunks)


def _in_pool(chunks: Iterator[Chunk], encoder: Encoder, workers: int) -> Iterator[EncodedChunk]:
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(encoder,),
    )
    waiting: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(encode_in_worker, chunk))
            if len(waiting) >= _CHUNKS_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"a worker process died, most likely for lack of memory; try fewer than --workers {workers}"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _add(
    writer: DatasetWriter, chunk: EncodedChunk, counts: _Counts, on_error: str, say: Callable[[str], None]
) -> None:
    for bad in chunk.bad:
        if on_error == "stop":
            raise UserError(
                f"{bad.where}: {bad.reason}; mend it, or leave such records out with --on-error skip"
            )
        counts.bad_records += 1
        if counts.bad_records <= _COMPLAINTS_SHOWN:
            say(f"skipped: {bad.where}: {bad.reason}")
        if counts.bad_records == _COMPLAINTS_SHOWN:
            say("skipped: further ones are only counted")
    for document in np.split(chunk.ids, np.cumsum(chunk.lengths)[:-1]) if chunk.lengths else ():
        writer.add(document)
    counts.empty_documents += chunk.empty
    counts.documents_with_eod_inside += chunk.eod_inside


def _report(
    sidecar: Sidecar, counts: _Counts, options: PreprocessOptions, say: Callable[[str], None]
) -> None:
    say(
        f"wrote '{options.output}': {sidecar.documents} documents, {sidecar.tokens} tokens of type "
        f"{sidecar.dtype}, largest id {sidecar.largest_id} of a vocabulary of {sidecar.tokenizer.vocab_size}"
    )
    if counts.bad_records:
        say(f"skipped {counts.bad_records} records that are no documents")
    if counts.empty_documents:
        say(f"left out {counts.empty_documents} documents without text")
    if counts.documents_with_eod_inside:
        say(
            f"{counts.documents_with_eod_inside} documents spell '{sidecar.tokenizer.eod_token}' in their "
            "text and count as several"
        )
