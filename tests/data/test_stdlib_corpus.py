"""The standard library as a corpus: the same on every run, and held-out text is never trained on."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_aha.data.stdlib_corpus import main


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def split(folder: Path, share: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    train, held = folder / "train.jsonl", folder / "held.jsonl"
    main(["--output", str(train), "--held-out-output", str(held), "--held-out", share])
    return read(train), read(held)


def test_held_out_text_is_never_trained_on_and_every_run_gives_the_same(tmp_path: Path) -> None:
    train, held = split(tmp_path, "0.1")
    texts = [document["text"] for document in train + held]
    assert len(set(texts)) == len(texts) > 400
    assert 0.05 < len(held) / len(texts) < 0.15
    paths = [document["path"] for document in train]
    left_out = {"test", "tests", "site-packages"}
    assert "json/decoder.py" in paths and left_out.isdisjoint(
        part for path in paths for part in Path(path).parts
    )
    assert paths != sorted(paths)

    less, more = split(tmp_path, "0.2")
    assert [document["path"] for document in held if document not in more] == []
    assert [document for document in train if document not in more] == less
