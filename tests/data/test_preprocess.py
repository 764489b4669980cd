"""From text to ids: what becomes a document, what is left out, and what an interrupted run leaves."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import ADDED, EOD, TEXT, DyingTokenizer, full_disk

from megatron_aha.data.preprocess import PreprocessOptions, preprocess
from megatron_aha.data.preprocess_cli import main
from megatron_aha.data.sidecar import Sidecar, check_files, read_sidecar
from megatron_aha.data.writer import DatasetWriter
from megatron_aha.errors import UserError
from megatron_aha.hf.tokenizer import TextTokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(hf_folder: Path) -> TextTokenizer:
    return load_tokenizer(str(hf_folder), EOD)


class Bench:
    """Preprocesses into ``tmp_path / "out"`` and keeps what was said."""

    def __init__(self, folder: Path, tokenizer: TextTokenizer) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.output = str(folder / "out")
        self.said: list[str] = []

    def run(self, *inputs: Path, **options: Any) -> Sidecar:
        self.said.clear()
        names = tuple(str(path) for path in inputs)
        return preprocess(PreprocessOptions(names, self.output, **options), self.tokenizer, self.said.append)

    def write(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        return path

    def documents(self) -> list[list[int]]:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        dataset = IndexedDataset(self.output)
        return [dataset[number].tolist() for number in range(len(dataset))]

    def texts(self) -> list[str]:
        documents = self.documents()
        assert all(document[-1] == 0 for document in documents)
        return [self.tokenizer.decode(document[:-1]) for document in documents]


@pytest.fixture
def bench(tmp_path: Path, tokenizer: TextTokenizer) -> Bench:
    return Bench(tmp_path, tokenizer)


def json_lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


# --- what becomes a document ---


def test_every_document_ends_and_empty_ones_are_left_out(bench: Bench) -> None:
    sidecar = bench.run(bench.write("a.jsonl", json_lines("", "one", " \n\t", "two", "\u3000", "three", "")))
    assert bench.texts() == ["one", "two", "three"]
    assert sidecar.documents == 3
    assert sidecar.tokens == sum(len(document) for document in bench.documents())
    assert sidecar.source["left_out"]["empty_documents"] == 4
    assert any("4 documents without text" in line for line in bench.said)


def test_a_line_ends_at_a_line_feed_only(bench: Bench) -> None:
    strange = "a\u2028b\u2029c\u0085d\x0be\x0cf\r\ng \U0001f600 h"
    line = json.dumps({"text": strange}, ensure_ascii=False).encode()
    bench.run(bench.write("a.jsonl", b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line))
    assert bench.texts() == [strange, strange]


def test_nul_is_kept_and_half_a_surrogate_pair_is_replaced(bench: Bench) -> None:
    bench.run(bench.write("a.jsonl", rb'{"text": "a\u0000b \ud83d\ude00 \ud800 c"}'))
    assert bench.texts() == ["a\0b \U0001f600 \ufffd c"]


def test_added_tokens_keep_their_ids(bench: Bench) -> None:
    sidecar = bench.run(bench.write("a.jsonl", json_lines(f"{ADDED[0]}x{ADDED[4]}")))
    assert bench.documents()[0][0] == 300
    assert sidecar.largest_id == 304
    assert sidecar.tokenizer.vocab_size == 305


def test_documents_are_framed_by_the_tokenizers_tokens(bench: Bench, hf_folder: Path) -> None:
    bench.tokenizer = load_tokenizer(str(hf_folder), EOD, ADDED[1])
    sidecar = bench.run(bench.write("a.jsonl", json_lines("one", "two")))
    assert [(document[0], document[-1]) for document in bench.documents()] == [(301, 0)] * 2
    assert [bench.tokenizer.decode(document[1:-1]) for document in bench.documents()] == ["one", "two"]
    assert read_sidecar(bench.output).tokenizer.bos_id == sidecar.tokenizer.bos_id == 301
    assert sidecar.tokens == sum(len(document) for document in bench.documents())


def test_the_end_of_document_spelled_in_a_text_is_counted(bench: Bench) -> None:
    bench.run(bench.write("a.jsonl", json_lines(f"one{EOD}two", "three")))
    assert any("1 documents spell '<|endoftext|>'" in line for line in bench.said)


def test_plain_text_files_gzip_directories_and_globs(bench: Bench) -> None:
    folder = bench.folder / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("bee\nline two\n")
    (folder / "deep" / "a.md").write_bytes(b"\xef\xbb\xbfay")
    (folder / ".hidden").write_text("not this")
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(json_lines("sea")) + gzip.compress(json_lines("see")))
    bench.run(folder)
    assert bench.texts() == ["bee\nline two\n", "sea", "see", "ay"]
    bench.run(folder / "*.txt", folder / "**" / "*.md")
    assert bench.texts() == ["bee\nline two\n", "ay"]


def test_the_key_and_the_format_can_be_chosen(bench: Bench) -> None:
    path = bench.write("a.json", b'{"body": "one"}\n{"body": "two"}\n')
    with pytest.raises(UserError, match=r"--format jsonl or --format text"):
        bench.run(path)
    bench.run(path, file_format="jsonl", json_key="body")
    assert bench.texts() == ["one", "two"]
    bench.run(path, file_format="text")
    assert len(bench.texts()) == 1


# --- what is no document ---

BAD_LINES = [
    (b'{"text": "cut', r"not JSON: .* at column"),
    (b'{"txt": "x"}', r"no key 'text'; did you mean 'txt'"),
    (b'{"text": null}', r"'text' is a JSON null, not a string"),
    (b'{"text": 5}', r"'text' is a JSON number, not a string"),
    (b'{"text": ["x"]}', r"'text' is a JSON list, not a string"),
    (b'["x"]', r"a JSON list, not an object"),
    (b'{"text": "\xff"}', r"not UTF-8: byte 0xff at offset 10"),
    (b"[" * 100_000, r"recursion"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_stops_with_file_and_line_number(bench: Bench, line: bytes, reason: str) -> None:
    path = bench.write("a.jsonl", json_lines("one", "two") + b"\n" + line)
    with pytest.raises(UserError, match=rf"a.jsonl, line 4: .*{reason}.*--on-error skip"):
        bench.run(path)
    assert os.listdir(bench.folder) == ["a.jsonl"]


def test_bad_lines_are_skipped_and_counted_when_asked(bench: Bench) -> None:
    bad = b"".join(line + b"\n" for line, _ in BAD_LINES)
    sidecar = bench.run(bench.write("a.jsonl", json_lines("one") + bad + json_lines("two")), on_error="skip")
    assert bench.texts() == ["one", "two"]
    assert sidecar.source["left_out"]["bad_records"] == len(BAD_LINES)
    assert sum("a.jsonl, line " in line for line in bench.said) == len(BAD_LINES)
    assert any(f"skipped {len(BAD_LINES)} records" in line for line in bench.said)


def test_a_text_file_that_is_not_utf8_is_named(bench: Bench) -> None:
    path = bench.write("a.txt", "caf\u00e9".encode("latin-1"))
    with pytest.raises(UserError, match=r"a.txt: not UTF-8: byte 0xe9 at offset 3"):
        bench.run(path)


def test_cut_gzip_data_is_named(bench: Bench) -> None:
    whole = gzip.compress(json_lines(*[f"{number} {TEXT}" for number in range(100)]))
    for data in (whole[:-20], b"no gzip"):
        path = bench.write("a.jsonl.gz", data)
        with pytest.raises(UserError, match=r"a.jsonl.gz' cannot be read"):
            bench.run(path, on_error="skip")


def test_inputs_that_are_not_there_and_text_that_is_not_there(bench: Bench) -> None:
    with pytest.raises(UserError, match=r"--input '.*none.jsonl': no such file"):
        bench.run(bench.folder / "none.jsonl")
    with pytest.raises(UserError, match=r"no document with text"):
        bench.run(bench.write("a.jsonl", json_lines("", " ")))
    assert not Path(bench.output + ".json").exists()


def test_an_output_that_is_no_prefix(bench: Bench) -> None:
    path = bench.write("a.jsonl", json_lines("one"))
    for output in (bench.output + ".bin", str(bench.folder)):
        bench.output = output
        with pytest.raises(UserError, match="must be a prefix"):
            bench.run(path)
    bench.output = str(path / "below_a_file")
    with pytest.raises(UserError, match="cannot be written"):
        bench.run(path)


# --- ids ---


def test_the_largest_id_survives_a_vocabulary_that_looks_small(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<eod>": 0, "a": 1, "far": 70_000}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    bench = Bench(tmp_path, load_tokenizer(str(tmp_path / "tokenizer.json"), "<eod>"))
    sidecar = bench.run(bench.write("a.jsonl", json_lines("a far a")))
    assert bench.documents() == [[1, 70_000, 1, 0]]
    assert (sidecar.dtype, sidecar.largest_id) == ("int32", 70_000)


def test_an_id_outside_the_vocabulary_is_refused_rather_than_wrapped(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    with (
        DatasetWriter(str(tmp_path / "out"), tokenizer.record) as writer,
        pytest.raises(UserError, match=r"token id 65541, outside the vocabulary of 305"),
    ):
        writer.add(np.array([5, 65_541, 0]))


# --- workers, repeats, interruptions ---


def corpus(bench: Bench) -> Path:
    """1200 documents of very different lengths: several chunks, and more than one process begins for."""
    path = bench.write("corpus.jsonl", json_lines(*[f"{n} {TEXT * (n % 7) * 5}" for n in range(1200)]))
    assert path.stat().st_size > 1 << 20
    return path


def test_several_workers_write_the_same_files_as_one(bench: Bench) -> None:
    path = corpus(bench)
    one = bench.run(path)
    os.rename(bench.output + ".json", bench.folder / "first.json")
    assert bench.run(path, workers=2, overwrite=True) == one


def test_a_repeated_run_finds_everything_there_until_something_changes(bench: Bench) -> None:
    path = bench.write("a.jsonl", json_lines("one"))
    first = bench.run(path)
    stamp = os.stat(bench.output + ".bin").st_mtime_ns
    assert bench.run(path) == first
    assert bench.said == [f"already there: '{bench.output}' with 1 documents, {first.tokens} tokens"]
    assert os.stat(bench.output + ".bin").st_mtime_ns == stamp

    bench.write("a.jsonl", json_lines("two"))
    bench.run(path)
    assert bench.texts() == ["two"]
    with open(bench.output + ".bin", "ab") as stream:
        stream.truncate(2)
    bench.run(path)
    assert bench.said[0].startswith("making it again") and "has 2 bytes" in bench.said[0]
    bench.tokenizer = load_tokenizer(str(bench.folder.parent / first.tokenizer.name), ADDED[0])
    bench.run(path)
    assert "other tokenizer, or beginning- or end-of-document token" in bench.said[0]
    assert bench.documents()[0][-1] == 300
    bench.tokenizer = load_tokenizer(str(bench.folder.parent / first.tokenizer.name), ADDED[0], ADDED[1])
    bench.run(path)
    assert "other tokenizer, or beginning- or end-of-document token" in bench.said[0]
    assert (bench.documents()[0][0], bench.documents()[0][-1]) == (301, 300)


def test_files_of_another_tool_are_not_overwritten_unasked(bench: Bench) -> None:
    path = bench.write("a.jsonl", json_lines("one"))
    Path(bench.output + ".bin").write_bytes(b"precious")
    with pytest.raises(UserError, match=r"out.bin' exists without .*--overwrite"):
        bench.run(path)
    assert Path(bench.output + ".bin").read_bytes() == b"precious"
    bench.run(path, overwrite=True)
    assert bench.texts() == ["one"]


def test_a_worker_that_dies_is_a_sentence_and_leaves_nothing(bench: Bench) -> None:
    path = corpus(bench)
    bench.tokenizer = DyingTokenizer(bench.tokenizer.record)
    with pytest.raises(UserError, match="a worker process died.*fewer than --workers 2"):
        bench.run(path, workers=2)
    assert os.listdir(bench.folder) == ["corpus.jsonl"]


def test_a_full_disk_is_a_sentence_and_leaves_nothing(bench: Bench) -> None:
    path = corpus(bench)
    with (
        full_disk(100_000),
        pytest.raises(UserError, match=r"--output '.*out' cannot be written: .*too large"),
    ):
        bench.run(path)
    assert os.listdir(bench.folder) == ["corpus.jsonl"]


def test_two_runs_do_not_write_one_dataset_at_once(bench: Bench) -> None:
    path = bench.write("a.jsonl", json_lines("one"))
    with (
        DatasetWriter(bench.output, bench.tokenizer.record),
        pytest.raises(UserError, match="another run is writing dataset"),
    ):
        bench.run(path)
    bench.run(path)
    assert bench.texts() == ["one"]


def write_and_die(prefix: str, tokenizer: TextTokenizer) -> None:
    writer = DatasetWriter(prefix, tokenizer.record)
    writer.add(np.arange(300))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_leaves_nothing_that_looks_complete(bench: Bench) -> None:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=write_and_die, args=(bench.output, bench.tokenizer))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert os.listdir(bench.folder) == [".out.unfinished.bin"]
    bench.run(bench.write("a.jsonl", json_lines("one")))
    assert bench.texts() == ["one"]
    assert sorted(os.listdir(bench.folder)) == ["a.jsonl", "out.bin", "out.idx", "out.json"]


def test_the_command_line_with_workers(bench: Bench, hf_folder: Path) -> None:
    path = corpus(bench)
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "tools" / "preprocess_data.py"), "--input", str(path)]
    command += ["--output", bench.output, "--workers", "2"]
    command += ["--tokenizer", str(hf_folder / "tokenizer.json"), "--eod", EOD]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"}
    environment.pop("TQDM_DISABLE", None)  # tools that other tests call in this process set it
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout and "1200 documents" in done.stdout
    assert "100%" in done.stderr
    check_files(bench.output, read_sidecar(bench.output), contents=True)


def test_the_command_line_refuses_what_makes_no_sense(bench: Bench, hf_folder: Path) -> None:
    options = ["--input", str(bench.folder), "--output", bench.output, "--tokenizer", str(hf_folder)]
    with pytest.raises(UserError, match="--eod '<eos>' is not a token"):
        main([*options, "--eod", "<eos>"])
    with pytest.raises(UserError, match="--workers 0 must be at least 1"):
        main([*options, "--workers", "0"])
