"""TensorBoard and ``metrics.jsonl`` get the same scalars, one value per step, also after resuming."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from megatron_aha.report.metrics import MetricsWriter
from megatron_aha.report.rewind import event_files, read_lines

TAGS = [
    *("train/lm_loss", "train/router_loss", "train/total_loss", "train/grad_norm"),
    *("valid/lm_loss", "valid/perplexity"),
    *("lr/model", "lr/router"),
    *("usage/total", "usage/beyond_window", "usage/layer_00", "usage/layer_01"),
    *("perf/step_seconds", "perf/tokens_per_s", "perf/tflops_done", "perf/tflops_dense_equivalent"),
    "memory/peak_gib",
]
USAGE = np.array([[0.0, 0.25, 1.0], [0.5, 0.125, 0.0]])


def values(step: int, run: int) -> dict[str, float]:
    return {tag: run + step + index / 64 for index, tag in enumerate(TAGS)}


def write_steps(folder: Path, run: int, first: int, last: int) -> None:
    writer = MetricsWriter(folder, resume_step=first - 1)
    for step in range(first, last + 1):
        writer.scalars(step, values(step, run))
    writer.usage_heatmap(last, USAGE)
    writer.close()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went to step 15 and was resumed from step 10 to 20."""
    folder = tmp_path_factory.mktemp("run")
    write_steps(folder, 100, 1, 15)
    write_steps(folder, 200, 11, 20)
    return folder


def expected(tag: str) -> list[tuple[int, float]]:
    return [(step, values(step, 100 if step <= 10 else 200)[tag]) for step in range(1, 21)]


def test_the_accumulator_reads_one_value_per_step_after_resuming(resumed: Path) -> None:
    events = EventAccumulator(str(resumed))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(TAGS)
    assert events.Tags()["images"] == ["usage/heatmap"]
    for tag in TAGS:
        assert [(event.step, event.value) for event in events.Scalars(tag)] == expected(tag)
    assert [event.step for event in events.Images("usage/heatmap")] == [20]


def test_the_event_files_themselves_hold_one_value_per_step(resumed: Path) -> None:
    steps = [
        event.step
        for path in event_files(resumed)
        for event in EventFileLoader(str(path)).Load()
        if any(value.tag == "train/lm_loss" for value in event.summary.value)
    ]
    assert steps == list(range(1, 21))


def test_metrics_jsonl_has_the_same_scalars(resumed: Path) -> None:
    lines = list(read_lines(resumed / "metrics.jsonl"))
    for tag in TAGS:
        assert [(line["step"], line[tag]) for line in lines] == expected(tag)


def test_the_usage_table_is_kept_in_numbers(resumed: Path) -> None:
    (line,) = read_lines(resumed / "usage.jsonl")
    assert line == {"step": 20, "usage": USAGE.tolist()}


def test_a_run_that_was_killed_while_writing_resumes(tmp_path: Path) -> None:
    write_steps(tmp_path, 100, 1, 5)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "train/lm_')
    (events,) = event_files(tmp_path)
    events.write_bytes(events.read_bytes()[:-7])
    write_steps(tmp_path, 200, 4, 6)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("train/lm_loss")] == [1, 2, 3, 4, 5, 6]


def test_a_new_run_in_a_used_folder_keeps_the_old_metrics_apart(tmp_path: Path) -> None:
    write_steps(tmp_path, 100, 1, 3)
    write_steps(tmp_path, 200, 1, 2)
    assert [line["train/lm_loss"] for line in read_lines(tmp_path / "metrics.jsonl")] == [201.0, 202.0]
    old = tmp_path / "previous-1"
    assert [line["train/lm_loss"] for line in read_lines(old / "metrics.jsonl")] == [101.0, 102.0, 103.0]
    assert len(event_files(old)) == len(event_files(tmp_path)) == 1


def test_a_loss_that_is_not_a_number_leaves_valid_json(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    writer.scalars(1, {"train/lm_loss": float("nan"), "lr/model": 1.0})
    writer.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "train/lm_loss": None, "lr/model": 1.0}


@pytest.fixture
def tensorboard_url(resumed: Path) -> Iterator[str]:
    """A real TensorBoard over the resumed run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(resumed), "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=20)


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as response:
        return json.load(response)


def fetch_until(url: str, ready: Any, seconds: float = 60) -> Any:
    """Returns the endpoint's answer once it is ready: the server starts before it has read the files."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer = fetch(url)
            if ready(answer) or time.monotonic() > deadline:
                return answer
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.3)


def test_tensorboard_serves_the_tags_with_one_value_per_step(tensorboard_url: str) -> None:
    tags = fetch_until(
        f"{tensorboard_url}/data/plugin/scalars/tags", lambda answer: len(answer.get(".", ())) >= len(TAGS)
    )
    assert sorted(tags["."]) == sorted(TAGS)
    series = fetch_until(
        f"{tensorboard_url}/data/plugin/scalars/scalars?tag=train/lm_loss&run=.",
        lambda answer: len(answer) >= 20,
    )
    assert [(step, value) for _, step, value in series] == expected("train/lm_loss")
    images = fetch_until(f"{tensorboard_url}/data/plugin/images/tags", lambda answer: "." in answer)
    assert list(images["."]) == ["usage/heatmap"]
