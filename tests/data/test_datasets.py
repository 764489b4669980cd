"""Datasets of a run: splits, blends, caches, and what is refused before anything is built."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from data_helpers import EOD, WriteDataset, full_disk, run_config

from megatron_aha.config.run import RunConfig
from megatron_aha.data.batches import BatchSource, build_batch_sources
from megatron_aha.data.checks import plan_splits
from megatron_aha.errors import UserError
from megatron_aha.hf.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("process_group")


def build(config: RunConfig) -> tuple[BatchSource, BatchSource | None]:
    return build_batch_sources(config, dp_rank=0, dp_size=1)


def tokens_of(source: BatchSource, steps: int, global_batch_size: int = 2) -> torch.Tensor:
    batches = [source.micro_batches(step * global_batch_size) for step in range(steps)]
    return torch.cat([batch.tokens for step in batches for batch in step])


def filled(value: int, documents: int = 6, length: int = 7) -> list[list[int]]:
    return [[value] * length for _ in range(documents)]


# --- splits ---


def test_a_split_without_documents_is_refused_before_building(write_dataset: WriteDataset) -> None:
    prefix = write_dataset("three", filled(5, documents=3))
    config = run_config([prefix], eval_interval=1, split="98,1,1")
    with pytest.raises(
        UserError, match=r"validation gets none of the 3 documents of '.*three'.*eval_interval 0"
    ):
        build(config)


def test_an_empty_split_that_nobody_reads_does_no_harm(write_dataset: WriteDataset) -> None:
    config = run_config([write_dataset("three", filled(5, documents=3))], split="98,1,1")
    train, valid = build(config)
    assert valid is None
    assert tokens_of(train, 4).numel() == 4 * 2 * 8


def test_training_and_validation_never_share_a_document(write_dataset: WriteDataset) -> None:
    documents = [[value] * 7 for value in range(1, 21)]
    config = run_config([write_dataset("twenty", documents)], eval_interval=1, split="70,20,10", steps=10)
    train, valid = build(config)
    assert valid is not None
    trained, validated = set(tokens_of(train, 10).tolist()), set(tokens_of(valid, 2).tolist())
    assert trained - {0} == set(range(1, 15))
    assert validated - {0} <= {15, 16, 17, 18}


def test_evaluation_does_not_change_what_training_reads(write_dataset: WriteDataset) -> None:
    prefix = write_dataset("twenty", [[value] * 7 for value in range(1, 21)])
    off = build(run_config([prefix], split="80,20,0"))[0]
    on = build(run_config([prefix], split="80,20,0", eval_interval=1))[0]
    assert torch.equal(tokens_of(off, 4), tokens_of(on, 4))


def test_validation_from_its_own_dataset(write_dataset: WriteDataset) -> None:
    train, valid = write_dataset("train", filled(5)), write_dataset("valid", filled(7))
    sources = build(run_config([train], valid_blend=[valid], eval_interval=1))
    assert sources[1] is not None
    assert set(tokens_of(sources[0], 4).tolist()) == {0, 5}
    assert set(tokens_of(sources[1], 2).tolist()) == {0, 7}


def test_two_sources_of_validation_are_refused(write_dataset: WriteDataset) -> None:
    prefix = write_dataset("a", filled(5))
    with pytest.raises(UserError, match=r"--data.split 90,10,0 keeps a share"):
        build(run_config([prefix], valid_blend=[prefix], eval_interval=1, split="90,10,0"))


def test_a_longer_run_begins_with_the_samples_of_a_shorter_one(write_dataset: WriteDataset) -> None:
    prefix = write_dataset("forty", [[value] * 7 for value in range(1, 41)])
    short, long = (build(run_config([prefix], steps=steps))[0] for steps in (6, 12))
    assert long.uses[0].epochs == 1
    assert torch.equal(tokens_of(short, 6), tokens_of(long, 6))


# --- blends ---


def shares(config: RunConfig, samples: int) -> dict[int, float]:
    tokens = tokens_of(build(config)[0], samples // 2)
    return {value: (tokens == value).sum().item() / (tokens != 0).sum().item() for value in (5, 7)}


def test_a_blend_follows_its_weights(write_dataset: WriteDataset) -> None:
    five, seven = write_dataset("five", filled(5, 40)), write_dataset("seven", filled(7, 10))
    assert shares(run_config(["3", five, "1", seven], steps=40), 80)[5] == pytest.approx(0.75, abs=0.02)


def test_a_blend_without_weights_follows_the_tokens_and_gives_all_samples(
    write_dataset: WriteDataset,
) -> None:
    five, seven = write_dataset("five", filled(5, 40)), write_dataset("seven", filled(7, 10))
    # Two epochs: Megatron-core alone would stop after one.
    assert shares(run_config([five, seven], steps=50), 100)[5] == pytest.approx(0.8, abs=0.02)


def test_a_blend_of_many_small_parts_and_few_samples_is_built(write_dataset: WriteDataset) -> None:
    blend: list[str] = ["0.7", write_dataset("large", filled(5, 2))]
    for number in range(15):
        blend += ["0.02", write_dataset(f"small{number}", filled(7, 2))]
    train, _ = build(run_config(blend, steps=5))
    assert tokens_of(train, 5).numel() == 5 * 2 * 8


@pytest.mark.parametrize(
    ("blend", "sentence"),
    [
        ([], "--data.blend is empty"),
        (["0.3", "{a}", "{a}"], "has no weight before it"),
        (["0", "{a}"], "weight 0 must be a positive number"),
        (["nan", "{a}"], "weight nan must be a positive number"),
        (["0.3", "0.7", "{a}"], "weight 0.3 is followed by another number"),
        (["0.3", "{a}", "0.7"], "no prefix follows the last weight"),
    ],
)
def test_a_blend_that_makes_no_sense_is_refused(
    write_dataset: WriteDataset, blend: list[str], sentence: str
) -> None:
    prefix = write_dataset("a", filled(5))
    with pytest.raises(UserError, match=sentence):
        build(run_config([item.format(a=prefix) for item in blend]))


@pytest.mark.parametrize("split", ["", "a,b", "-1,2", "0,0,0", "1,1,1,1", "nan,1"])
def test_a_split_that_makes_no_sense_is_refused(write_dataset: WriteDataset, split: str) -> None:
    with pytest.raises(UserError, match="--data.split .* must be up to three shares"):
        build(run_config([write_dataset("a", filled(5))], split=split))


# --- epochs ---


def test_epochs_used_are_reported_around_an_exact_fit(
    write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megatron_aha")
    # 10 documents of 8 tokens and one that makes the 81st: exactly 10 samples of 8 tokens and their labels.
    prefix = write_dataset("exact", [*filled(5, documents=10), []])
    epochs = {}
    for samples in (8, 10, 12):
        train, _ = build(run_config([prefix], steps=samples // 2))
        (use,) = train.uses
        assert (use.samples, use.documents, use.tokens) == (samples, 11, 81)
        epochs[samples] = use.epochs
        assert f"exact: {samples} samples" in caplog.text
        assert caplog.text.splitlines()[-1].endswith(f"epochs used: {use.epochs}")
    assert epochs == {8: 1, 10: 1, 12: 2}


def test_epochs_used_count_what_each_part_of_a_blend_gives(write_dataset: WriteDataset) -> None:
    five, seven = write_dataset("five", filled(5, 40)), write_dataset("seven", filled(7, 4))
    train, _ = build(run_config(["1", five, "1", seven], steps=20))
    assert [use.name for use in train.uses] == ["five", "seven"]
    assert [use.samples for use in train.uses] == [20, 20]
    assert [use.epochs for use in train.uses] == [1, 6]


# --- end of document ---


def test_the_end_of_a_document_is_learned_unless_it_is_asked_not_to_be_an_input(
    write_dataset: WriteDataset,
) -> None:
    prefix = write_dataset("a", filled(5))
    batch = build(run_config([prefix]))[0].micro_batches(0)[0]
    assert (batch.labels == 0).any()
    assert (batch.loss_mask == 1).all()
    batch = build(run_config([prefix], eod_mask_loss=True))[0].micro_batches(0)[0]
    assert torch.equal(batch.loss_mask == 0, batch.tokens == 0)
    assert batch.loss_mask[batch.labels == 0].all()


# --- caches ---


def test_new_text_under_an_old_prefix_gets_a_new_index(write_dataset: WriteDataset) -> None:
    config = run_config([write_dataset("corpus", filled(5, documents=6, length=7))])
    assert set(tokens_of(build(config)[0], 4).tolist()) == {0, 5}
    # As many documents and tokens as before, but cut differently.
    write_dataset("corpus", [[7] * length for length in (2, 12, 1, 13, 7, 7)])
    train, _ = build(config)
    batches = [batch for step in range(4) for batch in train.micro_batches(2 * step)]
    assert {int(token) for batch in batches for token in batch.tokens} == {0, 7}
    assert all(length <= 8 for batch in batches for length in batch.cu_seqlens.diff().tolist())
    row = torch.cat([batch.tokens for batch in batches])
    assert torch.equal(torch.cat([batch.labels for batch in batches])[:7], row[1:8])


def test_the_index_is_built_once_and_half_built_ones_are_ignored(
    write_dataset: WriteDataset, tmp_path: Path
) -> None:
    config = run_config([write_dataset("corpus", filled(5))], cache_dir=str(tmp_path / "cache"))
    first = tokens_of(build(config)[0], 4)
    (folder,) = (tmp_path / "cache").iterdir()
    built = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    half = folder.with_name(f"{folder.name}.building-12345678")
    half.mkdir()
    assert torch.equal(tokens_of(build(config)[0], 4), first)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == built
    assert sorted((tmp_path / "cache").iterdir()) == [folder, half]


def test_a_cache_directory_that_cannot_be_made_is_named(write_dataset: WriteDataset, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = run_config([write_dataset("corpus", filled(5))], cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"--data.cache_dir: cannot make '.*file/cache'"):
        build(config)


def test_a_disk_that_is_full_while_indices_are_written_is_a_sentence(write_dataset: WriteDataset) -> None:
    config = run_config([write_dataset("corpus", filled(5, documents=200))], steps=100)
    with full_disk(500), pytest.raises(UserError, match=r"--data.cache_dir: cannot write .*File too large"):
        build(config)
    assert tokens_of(build(config)[0], 1).numel() == 16


# --- damaged and foreign files ---


@pytest.mark.parametrize("keep", [-1, 0.5], ids=["one_byte", "half"])
def test_a_cut_bin_file_is_refused_with_both_sizes(write_dataset: WriteDataset, keep: float) -> None:
    prefix = write_dataset("corpus", filled(5))
    path = Path(prefix + ".bin")
    size = path.stat().st_size
    kept = size - 1 if keep == -1 else size // 2
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=rf"corpus.bin' has {kept} bytes, but .* says {size}"):
        build(run_config([prefix]))


def test_the_idx_file_of_another_dataset_is_refused_with_both_sizes(write_dataset: WriteDataset) -> None:
    prefix, other = write_dataset("corpus", filled(5)), write_dataset("other", filled(5, documents=9))
    foreign = Path(other + ".idx").read_bytes()
    expected = Path(prefix + ".idx").stat().st_size
    Path(prefix + ".idx").write_bytes(foreign)
    with pytest.raises(UserError, match=rf"corpus.idx' has {len(foreign)} bytes, but .* says {expected}"):
        build(run_config([prefix]))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_of_the_right_size_with_other_contents_is_refused(
    write_dataset: WriteDataset, suffix: str
) -> None:
    prefix = write_dataset("corpus", filled(5))
    path = Path(prefix + suffix)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"corpus{suffix}' has {len(data)} bytes as expected .* SHA-256"):
        build(run_config([prefix]))


def test_a_dataset_without_its_description_is_refused(write_dataset: WriteDataset) -> None:
    prefix = write_dataset("corpus", filled(5))
    Path(prefix + ".json").unlink()
    with pytest.raises(UserError, match=r"has no '.*corpus.json'"):
        build(run_config([prefix]))


def test_a_description_that_is_no_description_is_refused(write_dataset: WriteDataset) -> None:
    prefix = write_dataset("corpus", filled(5))
    page = json.loads(Path(prefix + ".json").read_text())
    for broken in ("{", "[]", json.dumps({**page, "bin": {}}), json.dumps({**page, "version": 2})):
        Path(prefix + ".json").write_text(broken)
        with pytest.raises(UserError, match=r"corpus.json'"):
            build(run_config([prefix]))


def test_a_vocabulary_larger_than_the_model_is_refused(write_dataset: WriteDataset) -> None:
    prefix = write_dataset("corpus", filled(5), vocab_size=305)
    with pytest.raises(UserError, match=r"vocabulary of 305 .* --model.vocab_size 301"):
        build(run_config([prefix]))


def test_a_model_may_have_more_rows_than_the_tokenizer_has_ids(write_dataset: WriteDataset) -> None:
    train, _ = build(run_config([write_dataset("corpus", filled(5), vocab_size=280)]))
    assert tokens_of(train, 1).numel() == 16


def test_documents_that_begin_differently_are_refused(write_dataset: WriteDataset) -> None:
    first, second = write_dataset("a", filled(5)), write_dataset("b", filled(5))
    page = json.loads(Path(second + ".json").read_text())
    page["tokenizer"] |= {"bos_id": 1, "bos_token": "<s>"}
    Path(second + ".json").write_text(json.dumps(page))
    with pytest.raises(
        UserError, match=r"beginning of document none, end 0.* beginning of document 1, end 0"
    ):
        build(run_config([first, second]))


def test_datasets_of_two_tokenizers_are_refused(write_dataset: WriteDataset) -> None:
    first, second = write_dataset("a", filled(5)), write_dataset("b", filled(5), identity="ff")
    with pytest.raises(UserError, match="made differently"):
        build(run_config([first, second]))
    with pytest.raises(UserError, match="made differently"):
        build(run_config([first], valid_blend=[second], eval_interval=1))


def test_the_tokenizer_that_the_checkpoint_carries_must_be_the_data_s(
    write_dataset: WriteDataset, hf_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(hf_folder, tmp_path / "run" / "step_00000000" / "source")
    (tmp_path / "run" / "latest").write_text("step_00000000")
    identity = load_tokenizer(str(hf_folder), EOD).record.sha256
    own, other = write_dataset("own", filled(5), identity=identity), write_dataset("other", filled(5))
    config = run_config([own])
    config.checkpoint.init_from = str(tmp_path / "run")
    assert tokens_of(build(config)[0], 1).numel() == 16
    config.data.blend = [other]
    with pytest.raises(
        UserError, match=r"carries another one .*; preprocess the text with --tokenizer .*run"
    ):
        build(config)


# --- wrong prefixes ---


def test_a_wrong_prefix_is_a_sentence_with_the_nearest_fix(
    write_dataset: WriteDataset, tmp_path: Path
) -> None:
    prefix = write_dataset("corpus", filled(5))
    wrong = {
        prefix + ".bin": f"write '{prefix}'",
        prefix + ".idx": f"write '{prefix}'",
        prefix + "s": "did you mean 'corpus'",
        str(tmp_path / "xyz"): "datasets beside it: corpus",
        str(tmp_path): f"is a directory.*{prefix}",
        str(tmp_path / "no" / "corpus"): "directory '.*no' does not exist",
    }
    for name, sentence in wrong.items():
        with pytest.raises(UserError, match=sentence):
            build(run_config([name]))


def test_the_plan_needs_no_process_group_and_builds_nothing(
    write_dataset: WriteDataset, tmp_path: Path
) -> None:
    prefix = write_dataset("corpus", filled(5, documents=10))
    train, valid = plan_splits(run_config([prefix], split="80,20,0", eval_interval=1), contents=False)
    assert valid is not None
    assert (train.documents, valid.documents) == (((0, 8),), ((8, 10),))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx", "corpus.json"]
