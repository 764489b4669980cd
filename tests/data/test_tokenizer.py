"""Tokenizers: ids, sizes, end of document, identity."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
from data_helpers import ADDED, EOD, TEXT

from megatron_aha.errors import UserError
from megatron_aha.hf.tokenizer import TextTokenizer, checkpoint_digests, load_tokenizer

BOS = ADDED[2]


def quiet(path: Path, eod: str | None = EOD) -> TextTokenizer:
    return load_tokenizer(str(path), eod, say=lambda line: None)


def test_the_vocabulary_counts_added_tokens_and_a_text_may_use_them(hf_folder: Path) -> None:
    tokenizer = quiet(hf_folder)
    assert tokenizer.record.vocab_size == 305
    (ids,) = tokenizer.encode_batch([f"a {ADDED[-1]} b"])
    assert max(ids) == 304
    assert tokenizer.decode(ids) == f"a {ADDED[-1]} b"


def test_documents_are_neither_cut_nor_padded_and_get_no_tokens_of_their_own(hf_folder: Path) -> None:
    tokenizer = quiet(hf_folder)
    short, long = tokenizer.encode_batch(["x", TEXT * 20])
    assert len(short) == 1
    assert tokenizer.decode(long) == TEXT * 20


def test_a_folder_and_its_tokenizer_json_are_the_same_tokenizer(hf_folder: Path, tmp_path: Path) -> None:
    shutil.copy(hf_folder / "tokenizer.json", tmp_path)
    folder, file, bare = quiet(hf_folder), quiet(hf_folder / "tokenizer.json"), quiet(tmp_path)
    assert folder.record.sha256 == file.record.sha256 == bare.record.sha256
    assert folder.encode_batch([TEXT]) == file.encode_batch([TEXT]) == bare.encode_batch([TEXT])


def test_the_default_end_of_document_is_said_aloud(hf_folder: Path, sentencepiece_model: Path) -> None:
    said: list[str] = []
    assert load_tokenizer(str(hf_folder), say=said.append).record.eod_id == 0
    assert load_tokenizer(str(sentencepiece_model), say=said.append).record.eod_id == 2
    assert "'<|endoftext|>' (id 0)" in said[0] and "--eod" in said[0]
    assert "'</s>' (id 2)" in said[1]
    load_tokenizer(str(hf_folder), EOD, say=said.append)
    assert len(said) == 2


def test_a_missing_end_of_document_token_is_a_sentence(hf_folder: Path, sentencepiece_model: Path) -> None:
    with pytest.raises(
        UserError, match=r"--eod '<\|endoftxt\|>' is not a token .* did you mean '<\|endoftext\|>'"
    ):
        quiet(hf_folder, "<|endoftxt|>")
    with pytest.raises(UserError, match=r"names no end-of-sequence token; choose .* --eod"):
        quiet(hf_folder / "tokenizer.json", None)
    with pytest.raises(UserError, match=r"--eod '<eod>' is not a piece"):
        quiet(sentencepiece_model, "<eod>")


def test_sentencepiece_gives_its_own_ids(sentencepiece_model: Path) -> None:
    import sentencepiece

    tokenizer = quiet(sentencepiece_model, None)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    assert tokenizer.record.vocab_size == reference.get_piece_size()
    texts = ["some words", "\u6f22\u5b57 \0 \U0001f600"]
    assert tokenizer.encode_batch(texts) == [reference.encode(text) for text in texts]
    assert tokenizer.decode(tokenizer.encode_batch(texts[:1])[0]) == texts[0]


def test_a_sentencepiece_file_may_carry_a_version_in_its_name(
    sentencepiece_model: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(sentencepiece_model, tmp_path / "tokenizer.model.v3"))
    assert quiet(path, None).record.sha256 == quiet(sentencepiece_model, None).record.sha256


def test_tokenizers_travel_to_worker_processes(hf_folder: Path, sentencepiece_model: Path) -> None:
    for path, eod in ((hf_folder, EOD), (sentencepiece_model, None)):
        tokenizer = quiet(path, eod)
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.record == tokenizer.record
        assert copy.encode_batch([TEXT]) == tokenizer.encode_batch([TEXT])


def test_another_vocabulary_has_another_identity(hf_folder: Path, sentencepiece_model: Path) -> None:
    from tokenizers import Tokenizer

    original = quiet(hf_folder).record
    assert quiet(sentencepiece_model, None).record.sha256 != original.sha256
    longer = Tokenizer.from_file(str(hf_folder / "tokenizer.json"))
    longer.add_tokens(["<new>"])
    path = hf_folder.parent / f"{hf_folder.name}_longer.json"
    longer.save(str(path))
    assert quiet(path).record.vocab_size == 306
    assert quiet(path).record.sha256 != original.sha256


def test_one_vocabulary_that_cuts_text_differently_is_another_tokenizer(
    hf_folder: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    other = Tokenizer.from_file(str(hf_folder / "tokenizer.json"))
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    other.save(str(tmp_path / "tokenizer.json"))
    assert quiet(tmp_path).record.vocab_size == 305
    assert quiet(tmp_path).record.sha256 != quiet(hf_folder).record.sha256


def test_ids_that_leave_gaps_count_up_to_the_largest(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "<eod>": 1, "b": 70000}, unk_token="a")).save(str(path))
    assert quiet(path, "<eod>").record.vocab_size == 70001


def test_a_checkpoint_lends_its_tokenizer(hf_folder: Path, tmp_path: Path) -> None:
    step = tmp_path / "run" / "step_00000000"
    shutil.copytree(hf_folder, step / "source")
    (step / "index.json").write_text("{}")
    (tmp_path / "run" / "latest").write_text("step_00000000\n")
    record = quiet(hf_folder).record
    assert quiet(tmp_path / "run").record.sha256 == quiet(step).record.sha256 == record.sha256
    assert next(checkpoint_digests(str(tmp_path / "run"))) == record.sha256
    shutil.rmtree(step / "source")
    assert list(checkpoint_digests(str(tmp_path / "run"))) == []
    with pytest.raises(UserError, match="carries no tokenizer"):
        quiet(tmp_path / "run")


def test_what_is_no_tokenizer_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "broken.model").write_bytes(b"no model")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("a.model", "b.model"):
        (tmp_path / "two" / name).write_bytes(b"")
    for name, sentence in {
        "missing": "there is no",
        "broken.json": "is not a tokenizer.json",
        "broken.model": "is not a sentencepiece model",
        "notes.txt": "ends in '.txt'",
        "empty": "holds no tokenizer",
        "two": r"several tokenizers \(a.model, b.model\)",
    }.items():
        with pytest.raises(UserError, match=sentence):
            quiet(tmp_path / name)


@pytest.fixture
def with_bos(hf_folder: Path, tmp_path: Path) -> Path:
    """The tiny tokenizer as Llama 3's and Gemma's are: it puts a token before each text."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(hf_folder / "tokenizer.json"))
    begin = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, begin)]
    )
    tokenizer.save(str(tmp_path / "with_bos.json"))
    return tmp_path / "with_bos.json"


def test_documents_begin_as_the_tokenizer_begins_a_text(with_bos: Path, hf_folder: Path) -> None:
    said: list[str] = []
    record = load_tokenizer(str(with_bos), EOD, say=said.append).record
    assert (record.bos_token, record.bos_id) == (BOS, 302)
    assert said == [
        f"beginning of document: '{BOS}' (id 302), as the tokenizer begins a text; "
        "choose another with --bos, or none with --bos ''"
    ]
    for path, bos, expected in (
        (with_bos, "", None),
        (with_bos, ADDED[0], 300),
        (hf_folder, None, None),
        (hf_folder, BOS, 302),
    ):
        record = load_tokenizer(str(path), EOD, bos, say=said.append).record
        assert record.bos_id == expected and record.bos_token == (bos or None)
    assert len(said) == 1


def test_one_token_for_both_ends_stands_once_between_documents(with_bos: Path) -> None:
    assert load_tokenizer(str(with_bos), BOS, say=lambda line: None).record.bos_id is None
    with pytest.raises(UserError, match=f"--bos '{BOS}' is the end-of-document token too"):
        load_tokenizer(str(with_bos), BOS, BOS)


def test_a_beginning_that_is_no_token_is_a_sentence(hf_folder: Path, sentencepiece_model: Path) -> None:
    with pytest.raises(UserError, match="--bos '<tol>' is not a token of .* did you mean '<tool>'"):
        load_tokenizer(str(hf_folder), EOD, "<tol>")
    with pytest.raises(UserError, match="--bos '<ss>' is not a piece of .* did you mean '<s>'"):
        load_tokenizer(str(sentencepiece_model), None, "<ss>", say=lambda line: None)
    record = load_tokenizer(str(sentencepiece_model), None, "<s>", say=lambda line: None).record
    assert (record.bos_token, record.bos_id) == ("<s>", 1)
