"""Perplexity and usage by position, against the definition."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from evaluating import evaluate
from hf_models import make_aha, make_llama

from megatron_aha.errors import UserError
from megatron_aha.evaluation.perplexity import bucket_starts, read_texts
from megatron_aha.evaluation.table import names_of

WORDS = [
    torch.randint(296, (length,), generator=torch.Generator().manual_seed(length)) for length in (300, 5, 1)
]
DOCUMENTS = [" ".join(f"w{int(word)}" for word in words) for words in WORDS]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    return path


def test_each_position_is_counted_once_in_its_bucket_with_its_usage(folders: Path, text: Path) -> None:
    found = evaluate(folders, "--text", str(text), "--length", "200")["models"]
    pieces = [WORDS[0][:200] + 4, WORDS[0][200:] + 4, WORDS[1] + 4]  # one word predicts nothing
    for result, model in zip(found, (make_llama(), make_aha()), strict=True):
        losses: dict[bool, list[float]] = {False: [], True: []}
        routes: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        for piece in pieces:
            output = model(piece[None], **({"output_router_stats": True} if result["name"] == "aha" else {}))
            likely = output.logits[0].detach().double().log_softmax(dim=-1)
            for place in range(len(piece)):
                if place:
                    losses[place >= 128].append(-float(likely[place - 1, piece[place]]))
                if result["name"] == "aha":
                    routes[place >= 128].append(torch.stack([layer[0, place] for layer in output.routes]))
        text_result = result["text"]
        assert [(bucket["first"], bucket["last"]) for bucket in text_result["buckets"]] == [
            (0, 127),
            (128, 199),
        ]
        for bucket, late in zip(text_result["buckets"], (False, True), strict=True):
            assert bucket["tokens"] == len(losses[late])
            assert bucket["perplexity"] == pytest.approx(
                math.exp(sum(losses[late]) / len(losses[late])), rel=1e-5
            )
            if result["name"] == "aha":
                assert bucket["usage"] == pytest.approx(float(torch.stack(routes[late]).double().mean()))
        both = losses[False] + losses[True]
        assert text_result["tokens"] == len(both) == 199 + 99 + 4
        assert text_result["perplexity"] == pytest.approx(math.exp(sum(both) / len(both)), rel=1e-5)
    dense, aha = (result["text"] for result in found)
    assert dense["usage"] is None and 0 < aha["usage_beyond_window"] < 1 and len(aha["usage_per_layer"]) == 2
    assert dense["fingerprint"] == aha["fingerprint"] and found[1]["window"] == 8


def test_the_table_has_a_pair_of_columns_for_each_model(
    folders: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate(folders, "--text", str(text), "--length", "200")["models"]
    lines = capsys.readouterr().out.splitlines()
    head = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert head == ["positions", "tokens", "perplexity dense", "usage dense", "perplexity aha", "usage aha"]
    total = [
        cell.strip()
        for cell in next(line for line in lines if line.startswith("| all")).strip("|").split("|")
    ]
    dense, aha = (result["text"] for result in found)
    assert total == [
        "all",
        "302",
        f"{dense['perplexity']:.3f}",
        "1 (dense)",
        f"{aha['perplexity']:.3f}",
        f"{aha['usage']:.4f}",
    ]
    assert "tokenizers differ" not in "".join(lines)


def test_a_bound_on_the_tokens_is_kept(folders: Path, text: Path) -> None:
    (found,) = evaluate(
        folders, "--text", str(text), "--max-tokens", "50", "--length", "200", models=("aha",)
    )["models"]
    assert found["text"]["tokens"] == 49


def test_each_piece_begins_as_the_tokenizer_begins_a_text(folders: Path, text: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    shutil.copytree(folders / "dense", tmp_path / "dense")
    backend = Tokenizer.from_file(str(tmp_path / "dense" / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(tmp_path / "dense" / "tokenizer.json"))
    (found,) = evaluate(tmp_path, "--text", str(text), "--length", "200", models=("dense",))["models"]
    begin = torch.tensor([1])
    pieces = [torch.cat([begin, piece + 4]) for piece in (WORDS[0][:199], WORDS[0][199:], *WORDS[1:])]
    assert found["text"]["tokens"] == 300 + 5 + 1
    losses = [
        torch.nn.functional.cross_entropy(
            make_llama()(piece[None]).logits[0, :-1].double(), piece[1:], reduction="sum"
        )
        for piece in pieces
    ]
    assert found["text"]["perplexity"] == pytest.approx(math.exp(float(sum(losses)) / 306), rel=1e-5)


def test_other_tokens_are_told(
    folders: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf_models import save_tokenizer

    make_llama().save_pretrained(tmp_path / "other")
    save_tokenizer(tmp_path / "other", words=100)
    (tmp_path / "dense").symlink_to(folders / "dense")
    evaluate(tmp_path, "--text", str(text), "--length", "200", models=("dense", "other"))
    assert "The tokenizers differ" in capsys.readouterr().out


def test_buckets_are_powers_of_two() -> None:
    assert bucket_starts(100) == [0] and bucket_starts(128) == [0] and bucket_starts(129) == [0, 128]
    assert bucket_starts(1024) == [0, 128, 256, 512]


def test_plain_files_are_one_document_each(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.md").write_text("three")
    assert read_texts([str(tmp_path)], "text") == ["one\n\ntwo", "three"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"body": "x"}\n', "line 1: no key 'text'"),
        ('{"text": "x"}\n{"text": 5}\n', "line 2: the value of 'text' is a JSON number"),
        ("[1]\n", "line 1: a JSON list, not an object"),
        ("{", "line 1: not JSON"),
        (b'{"text": "\xff"}', "line 1: not UTF-8: byte 0xff at offset 10"),
        ('{"text": "w1"}\n', "holds no document of two tokens"),
        ("", "--text .*bad.jsonl: no document with text is in there"),
    ],
)
def test_what_is_no_text_is_told_with_its_line(
    folders: Path, tmp_path: Path, content: object, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    with pytest.raises(UserError, match=message):
        evaluate(folders, "--text", str(path), "--length", "100", models=("dense",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to measure: give --text"),
        (["--text", "x", "--length", "1"], "--length 1 must be at least 2"),
        (["--text", "nowhere"], "--text 'nowhere': no such file"),
        (["--text", "x", "--json", "nowhere/x.json"], "--json nowhere/x.json: there is no folder nowhere"),
        (["--text", "x", "--json", "."], "--json . is a folder"),
        (["--tasks", "x", "--limit", "0"], "--limit 0 must be at least 1"),
        (["--tasks", "x", "--batch-size", "0"], "--batch-size 0 must be"),
    ],
)
def test_options_without_a_meaning_are_refused(folders: Path, options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(folders, *options)


def test_sequences_longer_than_the_positions_are_refused(folders: Path, text: Path) -> None:
    with pytest.raises(UserError, match="--length 4097 is above the 4096 positions of .*dense"):
        evaluate(folders, "--text", str(text), "--length", "4097")


def test_names_are_as_long_as_it_takes() -> None:
    assert names_of(["runs/a/hf", "runs/b/hf/"]) == ["a/hf", "b/hf"]
    assert names_of(["dense", "x/aha"]) == ["dense", "aha"]
    assert len(set(names_of(["a", "a"]))) == 2
