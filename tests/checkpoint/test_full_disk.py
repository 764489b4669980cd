"""A disk that the kernel reports as full at every moment of a save: the older checkpoint is what is read."""

from __future__ import annotations

import ctypes
import json
import os
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_aha.checkpoint.format import CheckpointReader, CheckpointWriter, complete_steps
from megatron_aha.config.model import ModelConfig
from megatron_aha.errors import UserError

# From Linux's sched.h and mount.h.
CLONE_NEWNS, CLONE_NEWUSER, MS_REMOUNT = 0x00020000, 0x10000000, 32
PAGE = 4096


class SmallDisk:
    """A file system in memory that only this process sees, in a user namespace: it takes no privilege.

    Raises OSError where the system does not allow that.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.getuid(), os.getgid()
        self._check(self._libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        self._mount(0, 10_000, 10_000)

    def leave(self, pages: int | None = None, files: int | None = None) -> None:
        """Leaves room for so many pages of data and new files; None: enough."""
        now = os.statvfs(self._folder)
        used_pages, used_files = now.f_blocks - now.f_bfree, now.f_files - now.f_ffree
        self._mount(
            MS_REMOUNT,
            10_000 if pages is None else used_pages + pages,
            10_000 if files is None else used_files + files,
        )

    def _mount(self, flags: int, pages: int, files: int) -> None:
        # A size of 0 would mean no limit.
        options = f"size={max(pages, 1) * PAGE},nr_inodes={files}".encode()
        self._check(self._libc.mount(b"tmpfs", bytes(self._folder), b"tmpfs", flags, options))

    def _check(self, result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def in_a_process(function: Callable[[Path], Any], folder: Path) -> Any:
    """Returns what a function returns in a fork of this process, whose namespaces end with it."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = {"value": function(folder)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with os.fdopen(tell, "w") as stream:
            json.dump(answer, stream)
        os._exit(0)
    os.close(tell)
    with os.fdopen(told) as stream:
        answer = json.load(stream)
    os.waitpid(child, 0)
    assert "error" not in answer, answer["error"]
    return answer["value"]


def save(directory: Path, step: int) -> None:
    """Two files of one checkpoint and something to carry along."""
    source = directory.parent / "source"
    with CheckpointWriter(directory, step, ModelConfig(), None) as writer:
        records = [
            writer.write_file(f"{name}.safetensors", {name: torch.full((40, 40), float(step))})
            for name in "ab"
        ]
        writer.finish(records, {"step": step}, source)


def fill_at_every_moment(folder: Path, kind: str) -> list[str] | str:
    """Returns where a save was cut short by a disk that has ever more room, until it had enough."""
    try:
        disk = SmallDisk(folder)
    except OSError as error:
        return str(error)
    (folder / "source").mkdir()
    (folder / "source" / "tokenizer.json").write_text("{}")
    cut = []
    for room in range(100):
        directory = folder / f"{kind}-{room}"
        save(directory, 1)
        disk.leave(**{kind: room})
        try:
            save(directory, 2)
            return cut
        except UserError as error:
            assert "no space left on disk while writing" in str(error), error
            cut.append(str(error).split("while writing ")[1].split(" (")[0])
        finally:
            disk.leave()
        assert not list(directory.glob(".tmp-step*"))
        reader = CheckpointReader(directory)
        reader.verify()
        assert reader.read("a").unique().tolist() == [reader.step]
        # Folders that look like steps are complete, and the next save needs no help.
        assert [f"step_{step:08d}" for step in complete_steps(directory)] == sorted(
            path.name for path in directory.glob("step_*")
        )
        save(directory, 3)
        assert CheckpointReader(directory).step == 3
        assert not list(directory.glob(".*"))
    raise AssertionError("a save did not fit into 100")


@pytest.mark.parametrize("kind", ["pages", "files"])
def test_a_full_disk_at_every_moment_of_a_save(tmp_path: Path, kind: str) -> None:
    cut = in_a_process(lambda folder: fill_at_every_moment(folder, kind), tmp_path)
    if isinstance(cut, str):
        pytest.skip(f"a file system of one's own cannot be mounted here: {cut}")
    moments = Counter(Path(path).name.removeprefix(".tmp-") for path in cut)
    print(f"full at {kind}:", dict(moments))
    steps = {"a.safetensors", "b.safetensors", "state.json", "source", "index.json", "latest"}
    assert steps <= moments.keys(), moments
