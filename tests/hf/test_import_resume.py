"""An import that was killed goes on where it stopped, and ends with the bytes of one that was not."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_llama, save_tokenizer
from safetensors.torch import load_file, save_file

from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.errors import UserError
from megatron_aha.hf.exporter import export_checkpoint
from megatron_aha.hf.importer import import_checkpoint

# Everything by which an import changes a disk; Python announces each just before it happens.
DISK_EVENTS = {"open", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}
SHARD_BYTES = 100_000
STEP = "step_00000000"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "hf"
    make_llama().save_pretrained(folder, max_shard_size="200KB")
    save_tokenizer(folder)
    return folder


@pytest.fixture
def own_source(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source, tmp_path / "hf")
    return tmp_path / "hf"


def load(source: Path, output: Path, **options: Any) -> list[str]:
    """Imports and returns what was said."""
    said: list[str] = []
    import_checkpoint(source, output, check=False, say=said.append, **{"shard_bytes": SHARD_BYTES, **options})
    return said


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def states(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns inode and time of change of the weights' files: a file that is written again has others."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.safetensors")}


def killed(work: Callable[[], Any], when: Callable[[int, str, Path], bool]) -> bool:
    """Works in a process that is killed before the disk event for which ``when`` is true; returns whether it was."""
    child = os.fork()
    if child == 0:
        seen = 0

        def die(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in DISK_EVENTS:
                seen += 1
                target = arguments[1] if event == "os.rename" else arguments[0]
                if when(seen, event, Path(str(target))):
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def half_import(source: Path, output: Path, files: int = 3, **options: Any) -> dict[str, tuple[int, int]]:
    """Leaves an import of which so many files are finished, and returns their states."""
    last = f"weights_{files:05d}.safetensors.record.json"
    work = lambda: load(source, output, **options)  # noqa: E731
    assert killed(work, lambda _, event, path: event == "os.rename" and path.name == last)
    found = states(output / f".tmp-{STEP}")
    assert len(found) == files + 1  # the last one is there, but not noted
    return {name: found[name] for name in sorted(found)[:files]}


def test_killed_before_disk_events_of_an_import(source: Path, tmp_path: Path) -> None:
    load(source, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    every = 1 if "MEGATRON_AHA_EXHAUSTIVE" in os.environ else 11
    kept_counts = Counter[int]()
    for at in range(1, 1000, every):
        output = tmp_path / str(at)
        was_killed = killed(lambda: load(source, output), lambda seen, event, path: seen == at)  # noqa: B023
        notes = [
            path.name.removesuffix(".record.json") for path in (output / ".import").glob("[!.]*.record.json")
        ]
        found = states(output / f".tmp-{STEP}")
        finished = {name: found[name] for name in notes if name in found}
        if (output / STEP).exists():
            CheckpointReader(output).verify()
        said = load(source, output)
        assert contents(output) == whole, at
        after = states(output / STEP)
        assert {name: after[name] for name in finished} == finished, at
        assert any(line.startswith("going on") for line in said) == bool(finished)
        assert not any(path.name.startswith(".") for path in output.iterdir())
        shutil.rmtree(output)
        if not was_killed:
            break
        kept_counts[len(finished)] += 1
    print("killed with so many finished files, so many times:", dict(kept_counts))
    assert len(kept_counts) >= 4


def test_killed_again_and_again_an_import_ends(source: Path, tmp_path: Path) -> None:
    load(source, tmp_path / "whole")
    notes: list[Path] = []

    def at_the_second_note(_: int, event: str, path: Path) -> bool:
        if event == "os.rename" and path.parent.name == ".import" and path.name.startswith("weights"):
            notes.append(path)
        return len(notes) == 2

    rounds = 0
    while killed(lambda: load(source, tmp_path / "ours"), at_the_second_note):
        rounds += 1
        assert len(list((tmp_path / "ours" / ".import").glob("weights*.record.json"))) == rounds
    assert rounds == len(states(tmp_path / "ours" / STEP)) - 1 > 3
    assert contents(tmp_path / "ours") == contents(tmp_path / "whole")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file, note: flip(file),
        lambda file, note: file.write_bytes(file.read_bytes()[:-1]),
        lambda file, note: file.unlink(),
        lambda file, note: note.write_bytes(note.read_bytes()[:-1]),
        lambda file, note: note.unlink(),
    ],
    ids=["a flipped bit", "a cut file", "a missing file", "a cut note", "a missing note"],
)
def test_a_file_that_is_not_what_was_noted_is_written_again(
    source: Path, tmp_path: Path, damage: Callable[[Path, Path], Any]
) -> None:
    load(source, tmp_path / "whole")
    finished = half_import(source, tmp_path / "ours")
    name = sorted(finished)[1]
    damage(tmp_path / "ours" / f".tmp-{STEP}" / name, tmp_path / "ours" / ".import" / f"{name}.record.json")
    said = load(source, tmp_path / "ours")
    assert [line for line in said if line.startswith("going on: 2 of ")]
    assert contents(tmp_path / "ours") == contents(tmp_path / "whole")
    after = states(tmp_path / "ours" / STEP)
    assert {name for name in finished if after[name] != finished[name]} == {name}


def change_a_weight(source: Path) -> None:
    path = sorted(source.glob("model-*.safetensors"))[0]
    weights = {name: weight + 1 for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})  # of the same size


def change_an_epsilon(source: Path) -> None:
    path = source / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


@pytest.mark.parametrize(
    ("change", "options", "told"),
    [
        (change_a_weight, {}, "source files"),
        (change_an_epsilon, {}, "configuration"),
        (None, {"dtype": torch.bfloat16}, "--dtype"),
        (None, {"shard_bytes": 90_000}, "--max-shard-gb"),
    ],
    ids=["a weight", "the configuration", "the type", "the size of files"],
)
def test_what_was_made_of_something_else_is_not_taken(
    own_source: Path,
    tmp_path: Path,
    change: Callable[[Path], None] | None,
    options: dict[str, Any],
    told: str,
) -> None:
    finished = half_import(own_source, tmp_path / "ours")
    if change is not None:
        change(own_source)
    said = load(own_source, tmp_path / "ours", **options)
    assert [line for line in said if line.startswith("beginning anew") and line.endswith(f"has other {told}")]
    assert not any(line.startswith("going on") for line in said)
    load(own_source, tmp_path / "whole", **options)
    assert contents(tmp_path / "ours") == contents(tmp_path / "whole")
    assert not set(states(tmp_path / "ours" / STEP).values()) & set(finished.values())


def test_killed_while_it_begins_anew(source: Path, tmp_path: Path) -> None:
    load(source, tmp_path / "whole", dtype=torch.bfloat16)
    whole = contents(tmp_path / "whole")
    work = lambda: load(source, tmp_path / "ours", dtype=torch.bfloat16)  # noqa: E731
    for at in range(9, 24, 4):
        half_import(source, tmp_path / "ours")
        assert killed(work, lambda seen, event, path: seen == at)  # noqa: B023
        load(source, tmp_path / "ours", dtype=torch.bfloat16)
        assert contents(tmp_path / "ours") == whole
        shutil.rmtree(tmp_path / "ours")


def test_who_still_writes_an_old_file_does_not_write_into_the_new_one(source: Path, tmp_path: Path) -> None:
    half_import(source, tmp_path / "ours")
    with (tmp_path / "ours" / f".tmp-{STEP}" / "weights_00003.safetensors").open("r+b") as held:
        load(source, tmp_path / "ours")
        held.write(b"a worker of the killed import")
    CheckpointReader(tmp_path / "ours").verify()


def test_two_imports_do_not_write_the_same_folder(source: Path, tmp_path: Path) -> None:
    finished = half_import(source, tmp_path / "ours")
    with (tmp_path / "ours" / ".import" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is writing .*; wait for it"):
            load(source, tmp_path / "ours")
    said = load(source, tmp_path / "ours")
    assert any(line.startswith(f"going on: {len(finished)} of") for line in said)


def test_an_export_goes_on_too_but_not_with_another_checkpoint(source: Path, tmp_path: Path) -> None:
    load(source, tmp_path / "ours")

    def export(name: str) -> list[str]:
        said: list[str] = []
        export_checkpoint(
            tmp_path / "ours", tmp_path / name, shard_bytes=SHARD_BYTES, check=False, say=said.append
        )
        return said

    def half_export() -> dict[str, tuple[int, int]]:
        at_note = lambda _, event, path: event == "os.rename" and path.name.startswith("model-00004-of")  # noqa: E731
        assert killed(lambda: export("again"), at_note)
        assert not (tmp_path / "again").exists()
        return {
            name: state for name, state in states(tmp_path / ".tmp-again").items() if name < "model-00004"
        }

    export("whole")
    finished = half_export()
    assert len(finished) == 3
    assert any(line.startswith("going on: 3 of") for line in export("again"))
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")
    assert finished.items() <= states(tmp_path / "again").items()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]

    shutil.rmtree(tmp_path / "again")
    half_export()
    load(source, tmp_path / "ours", dtype=torch.bfloat16)
    assert any(line.endswith("has other checkpoint") for line in export("again"))
    export("other")
    assert contents(tmp_path / "again") == contents(tmp_path / "other")
