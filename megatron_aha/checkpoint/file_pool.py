"""Many files written by one process or several, each file once: finished ones of an earlier try are kept."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tqdm import tqdm

from megatron_aha.checkpoint.index import FileRecord
from megatron_aha.checkpoint.journal import Journal
from megatron_aha.errors import UserError
from megatron_aha.worker import end_with_parent

_LOOK_SECONDS = 0.2


class FileWork(Protocol):
    """What is to be written; with several workers each gets a pickled copy."""

    @property
    def names(self) -> Sequence[str]:
        """Returns the names of the files."""

    @property
    def sizes(self) -> Sequence[int]:
        """Returns the bytes of the tensors of each file."""

    def write(self, number: int, advance: Callable[[int], None]) -> FileRecord:
        """Writes one file and returns its record; calls ``advance`` with the bytes of each tensor."""


def write_files(
    work: FileWork, journal: Journal, *, workers: int, label: str, say: Callable[[str], None]
) -> list[FileRecord]:
    """Writes all files that the journal does not find finished; returns the records of all, in order.

    Args:
        work: the files.
        journal: of the folder that they are written to, opened.
        workers: processes that write, each a file at a time; 1 works in this process.
        label: what the progress bar is called.
        say: told how much is kept of an earlier try.

    Raises:
        UserError: a file cannot be written, or a worker died; the others have stopped.
    """
    task, records = _Task(work, journal), dict[int, FileRecord]()
    with tqdm(
        total=sum(work.sizes), desc=label, unit="B", unit_scale=True, leave=False, disable=None
    ) as progress:
        noted = [number for number, name in enumerate(work.names) if journal.has_note(name)]
        with closing(_run(task, _Task.kept, noted, workers, lambda _: None)) as results:
            for number, record in results:
                if record is not None:
                    records[number] = record
                    progress.update(work.sizes[number])
        if records:
            kept = sum(work.sizes[number] for number in records)
            say(
                f"going on: {len(records)} of {len(work.names)} files, {kept / 1e9:.2f} of "
                f"{sum(work.sizes) / 1e9:.2f} GB, are there already"
            )
            # what was there says nothing about how long the rest takes
            progress.initial = progress.n
            progress.unpause()
        missing = [number for number in range(len(work.names)) if number not in records]
        with closing(_run(task, _Task.written, missing, workers, progress.update)) as results:
            for number, record in results:
                assert record is not None
                records[number] = record
    return [records[number] for number in range(len(work.names))]


@dataclass(frozen=True)
class _Task:
    work: FileWork
    journal: Journal

    def kept(self, number: int, advance: Callable[[int], None]) -> FileRecord | None:
        """Returns the note on a file that an earlier try finished, or None."""
        return self.journal.finished(self.work.names[number])

    def written(self, number: int, advance: Callable[[int], None]) -> FileRecord | None:
        """Writes a file, notes that it is finished, and returns its record."""
        # A worker of a killed process may still hold the old file open: it must not write into the new one.
        path = self.journal.folder / self.work.names[number]
        path.unlink(missing_ok=True)
        try:
            record = self.work.write(number, advance)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self.journal.note(record)
        return record


_Method = Callable[[_Task, int, Callable[[int], None]], FileRecord | None]
_Results = Generator[tuple[int, FileRecord | None], None, None]


def _run(
    task: _Task, method: _Method, numbers: list[int], workers: int, advance: Callable[[int], Any]
) -> _Results:
    """Yields numbers and what a method of the task returned for each, as they are done."""
    if min(workers, len(numbers)) > 1:
        return _in_pool(task, method, numbers, workers, advance)
    return ((number, method(task, number, advance)) for number in numbers)


def _in_pool(
    task: _Task, method: _Method, numbers: list[int], workers: int, advance: Callable[[int], Any]
) -> _Results:
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(
        min(workers, len(numbers)), context, initializer=_start, initargs=(task, workers, done, stop)
    )
    seen = 0
    try:
        with _interrupts_held_back():
            futures = {pool.submit(_in_worker, method, number): number for number in numbers}
        waiting = set(futures)
        while waiting:
            ready, waiting = wait(waiting, _LOOK_SECONDS, FIRST_COMPLETED)
            now = done.get_obj().value  # without the lock, with which a worker may have died
            advance(now - seen)
            seen = now
            for future in ready:
                yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"a worker process died, most likely for lack of memory; try fewer than --workers {workers}"
        ) from error
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Lets Ctrl-C wait; processes started meanwhile never see one: their parent tells them to stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Stopped(Exception):
    """Another worker failed, or the user stopped the command."""


_worker: tuple[_Task, Callable[[int], None]] | None = None


def _start(task: _Task, workers: int, done: Any, stop: Any) -> None:
    """Prepares a worker process: its share of the cores, and no life beyond the parent's."""
    global _worker

    def advance(count: int) -> None:
        if stop.is_set():
            raise _Stopped
        with done.get_lock():
            done.value += count

    end_with_parent()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    _worker = task, advance


def _in_worker(method: _Method, number: int) -> FileRecord | None:
    assert _worker is not None, "_start has not run in this process"
    task, advance = _worker
    return method(task, number, advance)
