"""Notes on the files of an unfinished folder, kept beside it: who was killed goes on where it stopped."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_aha.checkpoint.atomic import disk_errors, sha256, write_text
from megatron_aha.checkpoint.index import FileRecord
from megatron_aha.errors import UserError

_MADE_FROM, _LOCK, _RECORD = "made_from.json", "lock", ".record.json"


@dataclass(frozen=True)
class Journal:
    """Which files of a folder that is being written are finished.

    A note is written when its file has been; whether the file is still what was noted is looked at again.

    Args:
        notes: folder of the notes; it is gone when the work is done.
        folder: temporary folder of the files.
    """

    notes: Path
    folder: Path

    @contextmanager
    def opened(self, made_from: dict[str, Any], say: Callable[[str], None]) -> Iterator[None]:
        """Keeps what an earlier process has left if it made it of the same things, removes it otherwise.

        Leaving the block by an exception keeps the finished files for the same command, if there are any.

        Args:
            made_from: JSON data that the files are a function of, by the names that the user knows; equal data give
                equal files.
            say: told what is removed and why.

        Raises:
            UserError: another process is writing the same folder, or the disk is full or not writable.
        """
        with disk_errors(self.notes):
            self.notes.mkdir(parents=True, exist_ok=True)
            lock = (self.notes / _LOCK).open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"another process is writing {self.folder}; wait for it, or choose another --output"
                ) from error
            try:
                with disk_errors(self.folder):
                    self._begin(json.loads(json.dumps(made_from)), say)
                yield
            except BaseException as error:
                kept = len(list(self.notes.glob(f"*{_RECORD}")))
                if not kept:
                    self.remove()
                    raise
                told = f"{kept} finished files stay in {self.folder}, and the same command goes on from there"
                if isinstance(error, UserError):
                    raise UserError(f"{error}; {told}") from error
                say(told)
                raise

    def has_note(self, file: str) -> bool:
        """Returns whether a file was finished once."""
        return self._note_of(file).exists()

    def finished(self, file: str) -> FileRecord | None:
        """Returns the note on a file, or None when there is none or the file is not what was noted any more."""
        path = self.folder / file
        record = _read(self._note_of(file))
        if record is None or not path.is_file() or path.stat().st_size != record["bytes"]:
            return None
        return record if sha256(path) == record["sha256"] else None

    def note(self, record: FileRecord) -> None:
        """Notes that a file is finished. Raises UserError when the disk is full or not writable."""
        write_text(self._note_of(record["file"]), json.dumps(record))

    def remove(self) -> None:
        """Removes the notes, and the folder when it still has its temporary name."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.notes, ignore_errors=True)

    def _begin(self, made_from: dict[str, Any], say: Callable[[str], None]) -> None:
        path = self.notes / _MADE_FROM
        before = _read(path)
        if before != made_from:
            if before is not None:
                keys = [key for key in {**before, **made_from} if before.get(key) != made_from.get(key)]
                say(f"beginning anew: what was left unfinished in {self.folder} has other {', '.join(keys)}")
            # whatever a kill interrupts here, what is left names no other things than it was made from
            path.unlink(missing_ok=True)
            for note in self.notes.glob(f"*{_RECORD}"):
                note.unlink()
            if self.folder.exists():
                shutil.rmtree(self.folder)
            write_text(path, json.dumps(made_from, indent=1))
        self.folder.mkdir(parents=True, exist_ok=True)

    def _note_of(self, file: str) -> Path:
        return self.notes / f"{file}{_RECORD}"


def state_of(path: Path) -> list[Any]:
    """Returns where a file really is, its size in bytes, and when it was last written."""
    state = os.stat(path)
    return [str(path.resolve()), state.st_size, state.st_mtime_ns]


def _read(path: Path) -> Any:
    """Returns JSON data, None when there is none or it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
