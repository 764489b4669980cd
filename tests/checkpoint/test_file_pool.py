"""Several processes write files: what happens when one fails, dies, or everything is to stop."""

from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_aha.checkpoint.file_pool import write_files
from megatron_aha.checkpoint.index import FileRecord
from megatron_aha.checkpoint.journal import Journal
from megatron_aha.errors import UserError


class Letters:
    """Writes files of one letter each, slowly; the one with the number ``bad`` does something else."""

    def __init__(self, folder: Path, bad: Callable[[], None] | None = None, steps: int = 3) -> None:
        self.names = [f"{letter}.txt" for letter in "abcdef"]
        self.sizes = [steps] * len(self.names)
        self._folder = folder
        self._bad = bad

    def write(self, number: int, advance: Callable[[int], None]) -> FileRecord:
        text = ""
        for _ in range(self.sizes[number]):
            if number == 1 and self._bad is not None:
                time.sleep(0.2)
                self._bad()
            time.sleep(0.01)
            advance(1)
            text += self.names[number][0]
        path = self._folder / self.names[number]
        path.write_text(text)
        return {"file": path.name, "bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def complain() -> None:
    raise UserError("the letter b is not in stock")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt_parent() -> None:
    # a terminal sends Ctrl-C to all of them; who would hear it in the middle of something prints a traceback
    if signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        raise UserError("a worker would hear Ctrl-C itself")
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.2)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    yield Journal(tmp_path / "notes", tmp_path / "files")
    assert not [thread for thread in threading.enumerate() if "Executor" in thread.name]


def write(journal: Journal, work: Letters, workers: int, said: list[str]) -> list[FileRecord]:
    with journal.opened({"letters": 1}, said.append):
        return write_files(work, journal, workers=workers, label="letters", say=said.append)


def finished(journal: Journal) -> list[str]:
    return sorted(path.name.removesuffix(".record.json") for path in journal.notes.glob("*.record.json"))


def test_workers_return_the_records_in_order(journal: Journal) -> None:
    said: list[str] = []
    records = write(journal, Letters(journal.folder), 3, said)
    assert [record["file"] for record in records] == [f"{letter}.txt" for letter in "abcdef"]
    assert {path.name: path.read_text() for path in journal.folder.iterdir()} == {
        f"{letter}.txt": letter * 3 for letter in "abcdef"
    }
    assert said == []
    assert write(journal, Letters(journal.folder, bad=complain), 1, said) == records
    assert said == ["going on: 6 of 6 files, 0.00 of 0.00 GB, are there already"]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (complain, "the letter b is not in stock"),
        (die, "a worker process died, most likely for lack of memory; try fewer than --workers 2"),
    ],
)
def test_one_that_fails_stops_the_others(journal: Journal, bad: Callable[[], None], sentence: str) -> None:
    started = time.monotonic()
    # the first file alone would take a thousand seconds: nobody waits for it
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}") as error:
        write(journal, Letters(journal.folder, bad, steps=100_000), 2, [])
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < 500
    assert not journal.folder.exists() and not journal.notes.exists()  # nothing was finished


def test_ctrl_c_stops_all_and_keeps_what_is_finished(
    journal: Journal, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        write(journal, Letters(journal.folder, bad=interrupt_parent), 2, said)
    done = finished(journal)
    assert "a.txt" in done and "b.txt" not in done
    assert sorted(path.name for path in journal.folder.iterdir()) == done
    assert said == [
        f"{len(done)} finished files stay in {journal.folder}, and the same command goes on from there"
    ]
    assert "Traceback" not in capfd.readouterr().err
    write(journal, Letters(journal.folder), 1, said)
    assert len(finished(journal)) == 6


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("workers", [1, 2])
def test_the_bar_counts_bytes_and_begins_with_what_is_there(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    work = Letters(journal.folder, steps=40)
    with pytest.raises(ZeroDivisionError), journal.opened({"letters": 1}, lambda line: None):
        for number in (0, 1):
            journal.note(work.write(number, lambda count: None))
        raise ZeroDivisionError
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    write(journal, work, workers, [])
    drawn = [line for line in terminal.getvalue().split("\r") if "letters: " in line]
    shares = [int(line.split("letters: ")[1].split("%")[0]) for line in drawn]
    assert shares == sorted(shares) and "/240 " in drawn[-1], drawn
    # two of six files were there already; 17: one of them was looked at
    assert all(share in (0, 17) or share >= 33 for share in shares), drawn
    assert any(33 < share < 100 for share in shares), drawn
