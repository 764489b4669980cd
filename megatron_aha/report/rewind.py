"""Takes the files of a run back to a step, so that a resumed run has one value per step for any reader."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
USAGE_FILE = "usage.jsonl"


def event_files(directory: Path) -> list[Path]:
    """Returns the TensorBoard event files of one folder, oldest first."""
    return sorted(directory.glob("events.out.tfevents.*"))


def rewind(directory: Path, step: int) -> None:
    """Removes from every metrics file of the folder what belongs to steps after ``step``."""
    for name in (METRICS_FILE, USAGE_FILE):
        _rewind_lines(directory / name, step)
    for path in event_files(directory):
        _rewind_events(path, step)


def set_aside(directory: Path) -> None:
    """Moves the metrics files of an earlier run into the next free ``previous-N`` of the folder."""
    lines = [directory / name for name in (METRICS_FILE, USAGE_FILE)]
    old = [path for path in [*lines, *event_files(directory)] if path.exists()]
    if not old:
        return
    number = 1
    while (directory / f"previous-{number}").exists():
        number += 1
    target = directory / f"previous-{number}"
    target.mkdir()
    for path in old:
        path.rename(target / path.name)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a JSONL file; the last line may have been cut when its writer was killed."""
    if not path.exists():
        return
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _rewind_lines(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [record for record in read_lines(path) if record["step"] <= step]
    temporary = path.with_name(f".{path.name}.rewinding")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(temporary, path)


def _rewind_events(path: Path, step: int) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    records = list(RawEventFileLoader(str(path)).Load())  # ends quietly at a record that was cut
    kept = [record for record in records if Event.FromString(record).step <= step]
    if len(kept) == len(records):
        return
    # The name must not look like an event file, or a running TensorBoard reads it beside the original.
    temporary = path.with_name(f".rewinding-{os.getpid()}")
    with open(temporary, "wb") as file:
        writer = RecordWriter(file)
        for record in kept:
            writer.write(record)
    os.replace(temporary, path)
