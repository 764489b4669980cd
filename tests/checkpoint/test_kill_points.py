"""Killed at any moment of a save: what a resume takes is complete, and the next save tidies up."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_aha.checkpoint.format import CheckpointReader, CheckpointWriter, complete_steps, keep_newest
from megatron_aha.config.model import ModelConfig

# Everything by which a save changes a disk; Python announces each just before it happens.
DISK_EVENTS = {"open", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}


def save(directory: Path, step: int) -> None:
    """Two files of one checkpoint, then only the two newest are kept."""
    with CheckpointWriter(directory, step, ModelConfig(), None) as writer:
        records = [
            writer.write_file(f"{name}.safetensors", {name: torch.full((4, 4), float(step))}) for name in "ab"
        ]
        writer.finish(records, state={"step": step})
    keep_newest(directory, 2)


def killed_in_save(directory: Path, step: int, at: int) -> str | None:
    """Saves in a process that is killed before its disk event number ``at``; returns that event, None if past all."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def die(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in DISK_EVENTS:
                seen += 1
                if seen == at:
                    os.write(tell, f"{event} {Path(str(arguments[0])).name}".encode())
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
        save(directory, step)
        os._exit(0)
    os.close(tell)
    _, status = os.waitpid(child, 0)
    event = os.read(told, 1000).decode()
    os.close(told)
    assert os.WIFSIGNALED(status) == bool(event)
    return event or None


@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step written again"])
def test_killed_before_every_disk_event_of_a_save(tmp_path: Path, step: int) -> None:
    events = []
    for at in range(1, 200):
        directory = tmp_path / str(at)
        save(directory, 1)
        save(directory, 2)
        event = killed_in_save(directory, step, at)
        reader = CheckpointReader(directory)
        reader.verify()
        assert reader.step in (1, 2, 3)
        assert reader.step >= (2 if step == 3 else 1)
        assert reader.read("a").unique().tolist() == [reader.step]
        # Folders that look like steps are complete, however often a save was killed.
        assert [f"step_{found:08d}" for found in complete_steps(directory)] == sorted(
            path.name for path in directory.glob("step_*")
        )
        save(directory, 4)
        assert CheckpointReader(directory).step == 4
        assert not list(directory.glob(".*"))
        if event is None:
            break
        events.append(event)
    print("\n".join(events))
    kinds = Counter(event.split()[0] for event in events)
    assert kinds["os.rename"] >= 4 and kinds["os.remove"] >= 2 and kinds["os.mkdir"] >= 1, events
