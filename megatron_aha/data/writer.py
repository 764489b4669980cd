"""Writes token ids as a Megatron-core dataset that is either complete or not there."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from megatron_aha.data.sidecar import Sidecar, TokenizerRecord, hash_file, sidecar_path, write_sidecar
from megatron_aha.errors import UserError

logger = logging.getLogger(__name__)


class DatasetWriter:
    """Context manager that writes ``PREFIX.bin``, ``PREFIX.idx`` and, last of all, ``PREFIX.json``.

    Until :meth:`finish` both files have temporary names, and leaving the context without it removes them: an
    interrupted run leaves nothing that looks complete.

    Args:
        prefix: the dataset; its directory is made when missing.
        tokenizer: who gave the ids; its ``vocab_size`` decides the width of an id in the file.
    """

    def __init__(self, prefix: str, tokenizer: TokenizerRecord) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._prefix = prefix
        self._tokenizer = tokenizer
        self._dtype = np.uint16 if tokenizer.vocab_size <= np.iinfo(np.uint16).max + 1 else np.int32
        target = Path(prefix)
        target.parent.mkdir(parents=True, exist_ok=True)
        # The same name every time: what a killed run left behind is written over.
        self._temporary = str(target.with_name(f".{target.name}.unfinished"))
        self._lock = self._exclusive()
        self._builder = IndexedDatasetBuilder(self._temporary + ".bin", dtype=self._dtype)
        self._documents = 0
        self._tokens = 0
        self._largest_id = -1

    def add(self, ids: np.ndarray) -> None:
        """Appends one document.

        Args:
            ids: integer ``[tokens]``, the end-of-document id last.

        Raises:
            UserError: an id does not belong to the vocabulary.
        """
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= self._tokenizer.vocab_size:
            raise UserError(
                f"document {self._documents} has token id {smallest if smallest < 0 else largest}, outside "
                f"the vocabulary of {self._tokenizer.vocab_size} of tokenizer '{self._tokenizer.name}'"
            )
        self._builder.add_document(ids, [len(ids)])
        self._documents += 1
        self._tokens += len(ids)
        self._largest_id = max(self._largest_id, largest)

    def finish(self, source: dict[str, Any]) -> Sidecar:
        """Completes the dataset and gives the files their names.

        Args:
            source: how it was made, kept in the sidecar.

        Returns:
            The sidecar as written.

        Raises:
            UserError: no document was added.
        """
        if self._documents == 0:
            raise UserError(f"no document with text was found, so dataset '{self._prefix}' was not written")
        self._builder.finalize(self._temporary + ".idx")
        for suffix in (".bin", ".idx"):
            with open(self._temporary + suffix, "rb") as stream:
                os.fsync(stream.fileno())
        sidecar = Sidecar(
            tokenizer=self._tokenizer,
            dtype=np.dtype(self._dtype).name,
            documents=self._documents,
            tokens=self._tokens,
            largest_id=self._largest_id,
            bin=hash_file(Path(self._temporary + ".bin")),
            idx=hash_file(Path(self._temporary + ".idx")),
            source=source,
        )
        # Without its sidecar a dataset is refused: a crash between these lines leaves no mixture that passes.
        sidecar_path(self._prefix).unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            os.replace(self._temporary + suffix, self._prefix + suffix)
        write_sidecar(self._prefix, sidecar)
        return sidecar

    def _exclusive(self) -> IO[bytes]:
        """Keeps a second run from writing the same dataset at the same time."""
        lock = open(self._temporary + ".bin", "ab")  # noqa: SIM115 (open as long as the writer)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise UserError(
                f"another run is writing dataset '{self._prefix}' now; wait for it or name another prefix"
            ) from error
        except OSError:
            # Some file systems of clusters have no locks; then only the user keeps two runs apart.
            logger.warning("no file locks at '%s': let no second run write it now", self._prefix)
        return lock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._builder.data_file.close()
        finally:
            self._lock.close()
            for suffix in (".bin", ".idx"):
                Path(self._temporary + suffix).unlink(missing_ok=True)
