from __future__ import annotations

import ast
import json
import logging
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

import megatron_aha
from megatron_aha.checkpoint.format import (
    CheckpointReader,
    CheckpointWriter,
    Slice,
    complete_steps,
    keep_newest,
)
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig, RopeScaling
from megatron_aha.errors import UserError

WHOLE = torch.arange(4 * 6, dtype=torch.float32).reshape(4, 6)


def save(directory: Path, step: int = 10, aha: AHAConfig | None = None, state: dict | None = None) -> Path:
    """Two files with the upper and the lower half of one tensor, as two ranks would write them."""
    with CheckpointWriter(directory, step, ModelConfig(rope_scaling=RopeScaling()), aha) as writer:
        upper = writer.write_file("rank0.safetensors", {"w": Slice(WHOLE[:2], (4, 6), (0, 0))})
        lower = writer.write_file(
            "rank1.safetensors",
            {"w": Slice(WHOLE[2:], (4, 6), (2, 0)), "half": WHOLE.bfloat16(), "count": torch.tensor(7)},
        )
        return writer.finish([upper, lower], state)


@pytest.mark.parametrize("start", [(0, 0), (1, 2), (3, 5)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (4, 6), (2, 1)])
def test_any_block_is_put_together_from_the_files(
    tmp_path: Path, start: tuple[int, int], shape: tuple[int, int]
) -> None:
    save(tmp_path)
    size = [min(n, total - a) for n, total, a in zip(shape, WHOLE.shape, start, strict=True)]
    block = CheckpointReader(tmp_path).read("w", start, size)
    assert torch.equal(block, WHOLE[start[0] : start[0] + size[0], start[1] : start[1] + size[1]])


def test_types_shapes_scalars_configuration_and_state_come_back(tmp_path: Path) -> None:
    folder = save(tmp_path, aha=AHAConfig(window=8), state={"samples": 20})
    reader = CheckpointReader(tmp_path)
    assert reader.folder == folder and reader.step == 10
    assert reader.model == ModelConfig(rope_scaling=RopeScaling()) and reader.aha == AHAConfig(window=8)
    assert reader.state == {"samples": 20}
    assert reader.names() == ["count", "half", "w"]
    assert reader.shape("w") == (4, 6) and reader.dtype("half") == torch.bfloat16
    assert torch.equal(reader.read("half"), WHOLE.bfloat16())
    assert reader.read("half", dtype=torch.float32).dtype == torch.float32
    assert reader.read("count").item() == 7
    assert CheckpointReader(folder).step == 10


def test_weights_are_told_from_training_state(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1, ModelConfig(), None) as writer:
        names = ["w", "optimizer.master.w", "rng.rank0"]
        writer.finish([writer.write_file("a.safetensors", {name: torch.zeros(2) for name in names})])
    reader = CheckpointReader(tmp_path)
    assert reader.weight_names() == ["w"]
    assert reader.names("optimizer.") == ["optimizer.master.w"]
    with pytest.raises(UserError, match="no tensor 'optimizer.master.v'; did you mean 'optimizer.master.w'"):
        reader.read("optimizer.master.v")


def test_parts_of_one_storage_are_written_apart(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    with CheckpointWriter(tmp_path, 1, ModelConfig(), None) as writer:
        record = writer.write_file("a.safetensors", {"a": flat[:6].view(2, 3), "b": flat[6:].view(2, 3).t()})
        writer.finish([record])
    reader = CheckpointReader(tmp_path)
    assert torch.equal(reader.read("a"), flat[:6].view(2, 3))
    assert torch.equal(reader.read("b"), flat[6:].view(2, 3).t())


@pytest.mark.parametrize(
    ("lower", "message"),
    [
        (Slice(WHOLE[1:3], (4, 6), (1, 0)), "overlap"),
        (Slice(WHOLE[3:], (4, 6), (3, 0)), "hold 18 of 24"),
        (Slice(WHOLE[2:], (4, 6), (3, 0)), "outside"),
        (Slice(WHOLE[2:].double(), (4, 6), (2, 0)), "disagree"),
    ],
)
def test_blocks_that_do_not_cover_a_tensor_are_refused_before_the_rename(
    tmp_path: Path, lower: Slice, message: str
) -> None:
    with (
        pytest.raises(ValueError, match=message),
        CheckpointWriter(tmp_path, 1, ModelConfig(), None) as writer,
    ):
        records = [
            writer.write_file("a.safetensors", {"w": Slice(WHOLE[:2], (4, 6), (0, 0))}),
            writer.write_file("b.safetensors", {"w": lower}),
        ]
        writer.finish(records)
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_save_is_never_taken_and_cleaned_up_by_the_next(tmp_path: Path) -> None:
    save(tmp_path, step=5)
    CheckpointWriter(tmp_path, 7, ModelConfig(), None).__enter__().write_file("a.safetensors", {"w": WHOLE})
    assert CheckpointReader(tmp_path).step == 5
    save(tmp_path, step=7)
    assert CheckpointReader(tmp_path).step == 7
    assert {path.name for path in CheckpointReader(tmp_path).folder.glob("*.safetensors")} == {
        "rank0.safetensors",
        "rank1.safetensors",
    }
    save(tmp_path, step=8)
    assert not list(tmp_path.glob(".*"))


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, state={"run": 1})
    save(tmp_path, state={"run": 2})
    assert CheckpointReader(tmp_path).state == {"run": 2}
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_00000010"}


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "message"), [(os.remove, "is missing"), (_empty, "has 0 bytes"), (_cut, "instead of")]
)
@pytest.mark.parametrize("victim", ["rank1.safetensors", "index.json", "state.json"])
def test_a_damaged_step_is_refused_and_the_last_complete_one_taken_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, message: str, victim: str
) -> None:
    save(tmp_path, step=5)
    folder = save(tmp_path, step=10, state={})
    damage(folder / victim)
    with pytest.raises(UserError, match=victim) as refused:
        CheckpointReader(folder)
    if victim != "index.json":
        assert message in str(refused.value)
    with caplog.at_level(logging.WARNING):
        assert CheckpointReader(tmp_path).step == 5
    assert victim in caplog.text and "step_00000005" in caplog.text
    assert complete_steps(tmp_path) == [5]


def test_a_changed_byte_is_found_before_its_tensor_is_read(tmp_path: Path) -> None:
    path = save(tmp_path) / "rank0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    reader = CheckpointReader(tmp_path)
    assert reader.read("count").item() == 7
    with pytest.raises(UserError, match="rank0.safetensors is damaged"):
        reader.read("w")
    with pytest.raises(UserError, match="rank0.safetensors is damaged"):
        reader.verify()


@pytest.mark.parametrize("content", [None, "", "step_00000099", "../elsewhere", "step_5"])
def test_a_broken_latest_falls_back_to_the_newest_complete_step(tmp_path: Path, content: str | None) -> None:
    save(tmp_path, step=5)
    save(tmp_path, step=10)
    save(tmp_path, step=12)
    (tmp_path / "step_00000012" / "rank0.safetensors").unlink()
    if content is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_text(content)
    assert CheckpointReader(tmp_path).step == 10


def test_what_is_no_checkpoint_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        CheckpointReader(tmp_path / "missing")
    with pytest.raises(UserError, match="no complete checkpoint.*convert_from_hf"):
        CheckpointReader(tmp_path)
    folder = save(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "version": 2}))
    with pytest.raises(UserError, match="version 2"):
        CheckpointReader(tmp_path)
    (folder / "index.json").write_text(json.dumps({**index, "model": {**index["model"], "colour": 1}}))
    with pytest.raises(UserError, match="ModelConfig has options.*colour"):
        CheckpointReader(tmp_path)


def test_old_steps_are_removed_but_never_the_last_complete_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step=step)
    (tmp_path / "step_00000003" / "rank0.safetensors").unlink()
    keep_newest(tmp_path, 1)
    assert complete_steps(tmp_path) == [2]


def test_every_so_manieth_step_is_kept_beside_the_newest(tmp_path: Path) -> None:
    for step in range(1, 9):
        save(tmp_path, step=step)
    keep_newest(tmp_path, 2, every=3)
    assert complete_steps(tmp_path) == [3, 6, 7, 8]
    assert not list(tmp_path.glob(".*"))


def test_the_folder_of_the_source_is_carried_and_checked(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    with CheckpointWriter(tmp_path / "run", 0, ModelConfig(), None) as writer:
        writer.finish([writer.write_file("a.safetensors", {"w": WHOLE})], source_dir=source)
    shutil.rmtree(source)
    reader = CheckpointReader(tmp_path / "run")
    assert reader.source_dir is not None and (reader.source_dir / "tokenizer.json").read_text() == "{}"
    (reader.source_dir / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer.json is missing"):
        CheckpointReader(reader.folder)


def test_no_space_left_is_one_sentence_and_leaves_the_older_step(tmp_path: Path) -> None:
    save(tmp_path, step=5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with (
            pytest.raises(UserError, match="no space left on disk while writing .*big.safetensors"),
            CheckpointWriter(tmp_path, 6, ModelConfig(), None) as writer,
        ):
            writer.write_file("big.safetensors", {"w": torch.zeros(2**16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert CheckpointReader(tmp_path).step == 5
    assert not list(tmp_path.glob(".tmp*"))


def test_nothing_in_the_library_can_unpickle() -> None:
    """No module loads torch files, pickles, or numpy object arrays."""
    forbidden = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    library = Path(megatron_aha.__file__).parent
    # the test launcher passes return values between processes it started itself
    modules = set(library.rglob("*.py")) - set((library / "testing").rglob("*.py"))
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not forbidden & {alias.name.split(".")[0] for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, path
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), path
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, path
