"""Reading back what a run has written: scalars over steps and usage per layer and head."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_aha.errors import UserError
from megatron_aha.report.rewind import METRICS_FILE, USAGE_FILE, event_files, read_lines


@dataclass
class RunRecord:
    """The measurements of one run.

    Args:
        scalars: by tag, the pairs of step and value in the order of steps.
        usage: by step, shares of tokens on full attention, float [layers, heads].
    """

    scalars: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    usage: dict[int, np.ndarray] = field(default_factory=dict)


def read_run(directory: str | Path) -> RunRecord:
    """Returns the measurements in a ``--logging.directory``.

    ``metrics.jsonl`` is read, or the event files when only they are there; these know no single heads.

    Raises:
        UserError: the folder is missing or holds no metrics.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the --logging.directory of a run")
    record = RunRecord()
    try:
        if (folder / METRICS_FILE).exists():
            _read_metrics(folder / METRICS_FILE, record)
        elif event_files(folder):
            _read_events(folder, record)
        else:
            raise UserError(
                f"{folder} holds neither {METRICS_FILE} nor event files; is it a --logging.directory?"
            )
        for line in read_lines(folder / USAGE_FILE):
            record.usage[line["step"]] = np.array(line["usage"])
    except json.JSONDecodeError as error:
        raise UserError(f"{folder}: a line of the metrics is not JSON ({error})") from error
    return record


def _read_metrics(path: Path, record: RunRecord) -> None:
    for line in read_lines(path):
        step = line.pop("step")
        for tag, value in line.items():
            record.scalars.setdefault(tag, []).append((step, float("nan") if value is None else value))


def _read_events(folder: Path, record: RunRecord) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        record.scalars[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
