"""One small face over Hugging Face and sentencepiece tokenizers: ids in, ids out, and who they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_aha.data.sidecar import TokenizerRecord
from megatron_aha.errors import UserError, nearest

# Two tokenizers with one vocabulary may still cut text differently; this text is cut to tell.
_PROBE = "A probe: naïve café, ＡＢＣ 漢字 \U0001f600\n\tdef f(x):\n        return x ** 12345.678  # it's\r\n"


class TextTokenizer(Protocol):
    """What preprocessing and the tools need of a tokenizer; it can be pickled into worker processes."""

    @property
    def record(self) -> TokenizerRecord:
        """Identity, vocabulary size (added tokens included) and end-of-document token."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, without beginning- or end-of-text tokens of the tokenizer's own."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens included."""


@dataclass
class HuggingFaceTokenizer:
    """A tokenizer of the ``tokenizers`` library.

    Args:
        backend: the ``tokenizers.Tokenizer``, without truncation and padding.
        record: who it is.
    """

    backend: Any
    record: TokenizerRecord

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text; special and added tokens spelled out in a text get their own ids."""
        return _fast_ids(self.backend, texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)


@dataclass
class SentencePieceTokenizer:
    """A sentencepiece model.

    Args:
        backend: the ``sentencepiece.SentencePieceProcessor``.
        record: who it is.
    """

    backend: Any
    record: TokenizerRecord

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text; control symbols spelled out in a text are ordinary text."""
        return _piece_ids(self.backend, texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids; sentencepiece drops control symbols and may normalise text."""
        return self.backend.decode(list(ids))


def load_tokenizer(
    path: str, eod: str | None = None, bos: str | None = None, say: Callable[[str], None] = print
) -> TextTokenizer:
    """Loads a tokenizer from local files.

    Args:
        path: a folder with Hugging Face tokenizer files, a ``tokenizer.json``, a GGUF file or a folder with
            one, a sentencepiece ``.model``, or a checkpoint of ours (its ``source/`` is used).
        eod: text of the end-of-document token; None takes the tokenizer's own end-of-sequence token.
        bos: text of the beginning-of-document token, ``""`` for none; None takes what the tokenizer itself puts
            before a text (of a sentencepiece model: none).
        say: told which of the two tokens were chosen when None was given.

    Returns:
        The tokenizer.

    Raises:
        UserError: no tokenizer is there, or it lacks the end- or beginning-of-document token.
    """
    location = _locate(Path(path))
    if _is_sentencepiece(location):
        tokenizer, chosen = _load_sentencepiece(location, eod, bos)
    else:
        tokenizer, chosen = _load_hugging_face(location, eod, bos)
    record = tokenizer.record
    if eod is None:
        say(f"end of document: {chosen} '{record.eod_token}' (id {record.eod_id}); choose another with --eod")
    if bos is None and record.bos_id is not None:
        say(
            f"beginning of document: '{record.bos_token}' (id {record.bos_id}), as the tokenizer begins a text; "
            "choose another with --bos, or none with --bos ''"
        )
    return tokenizer


def _fast_ids(backend: Any, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _piece_ids(backend: Any, texts: Sequence[str]) -> list[list[int]]:
    return backend.encode(list(texts), out_type=int, num_threads=1)


def checkpoint_digests(checkpoint: str) -> Iterator[str]:
    """Yields the digests that the tokenizer carried by a checkpoint of ours may have, the cheap one first.

    A ``tokenizer.json`` alone is read in a moment; only transformers knows what a ``tokenizer_config.json``
    beside it adds. Nothing is yielded for a checkpoint without a tokenizer.
    """
    source = _step_folder(Path(checkpoint)) / "source"
    if (source / "tokenizer.json").is_file():
        backend, _ = _fast_backend(source / "tokenizer.json")
        yield _hugging_face_digest(backend)
    if (source / "tokenizer_config.json").is_file():
        backend, _ = _fast_backend(source)
        yield _hugging_face_digest(backend)
    if (source / "tokenizer.json").is_file() or (source / "tokenizer_config.json").is_file():
        return
    for model in sorted(source.glob("*.model")):
        backend = _sentencepiece_backend(model)
        yield _digest(_pieces(backend), _piece_ids(backend, [_PROBE]))


def _is_sentencepiece(path: Path) -> bool:
    """By its name: ``tokenizer.model``, or with a version behind it as in ``tokenizer.model.v3``."""
    return ".model" in path.suffixes


def _step_folder(path: Path) -> Path:
    """The folder of a checkpoint's latest step, or the folder itself."""
    latest = path / "latest"
    return path / latest.read_text().strip() if latest.is_file() else path


def _locate(path: Path) -> Path:
    """The file or folder that holds the tokenizer itself."""
    if not path.exists():
        raise UserError(
            f"--tokenizer: there is no '{path}'; give a local folder, tokenizer.json, .gguf or .model file "
            "(download a model from the Hub first)"
        )
    if path.is_file():
        if path.suffix not in (".json", ".gguf") and not _is_sentencepiece(path):
            raise UserError(
                f"--tokenizer: '{path}' ends in '{path.suffix}'; expected a folder or a .json, .gguf or "
                ".model file"
            )
        return path
    step = _step_folder(path)
    if (step / "index.json").is_file():
        if not (step / "source").is_dir():
            raise UserError(
                f"--tokenizer: checkpoint '{step}' carries no tokenizer (no folder 'source'); "
                "give the model's own tokenizer"
            )
        return _locate(step / "source")
    if (path / "tokenizer_config.json").is_file():
        return path
    for pattern in ("tokenizer.json", "tokenizer.model", "*.gguf", "*.model"):
        found = sorted(path.glob(pattern))
        if len(found) == 1:
            return found[0]
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise UserError(f"--tokenizer: folder '{path}' holds several tokenizers ({names}); name one file")
    raise UserError(
        f"--tokenizer: folder '{path}' holds no tokenizer (no tokenizer_config.json, tokenizer.json, .gguf "
        "or .model)"
    )


def _load_hugging_face(location: Path, eod: str | None, bos: str | None) -> tuple[TextTokenizer, str]:
    """Returns the tokenizer and, in words, whose choice the end-of-document token is."""
    backend, own_eos = _fast_backend(location)
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    text = eod if eod is not None else own_eos
    if text is None:
        raise UserError(
            f"--tokenizer '{location}' names no end-of-sequence token; choose the end-of-document token "
            "with --eod"
        )
    special = [token.content for token in backend.get_added_tokens_decoder().values()]
    if text not in vocabulary:
        raise UserError(f"--eod '{text}' is not a token of '{location}'{_suggest(text, special)}")
    if bos is None:
        begin = _own_bos(backend)
        # the end of one document is the beginning of the next in a vocabulary that has one token for both
        bos_id = None if begin == vocabulary[text] else begin
    else:
        bos_id = _chosen_bos(bos, text, vocabulary, f"a token of '{location}'", special)
    record = TokenizerRecord(
        kind="huggingface",
        name=str(location),
        sha256=_hugging_face_digest(backend),
        vocab_size=max(len(vocabulary), 1 + max(vocabulary.values())),
        eod_id=vocabulary[text],
        eod_token=text,
        bos_id=bos_id,
        bos_token=None if bos_id is None else backend.id_to_token(bos_id),
    )
    return HuggingFaceTokenizer(backend, record), "the tokenizer's own end-of-sequence token"


def _own_bos(backend: Any) -> int | None:
    """The id that a tokenizer puts before a text by itself."""
    bare, framed = (backend.encode(_PROBE, add_special_tokens=add).ids for add in (False, True))
    return framed[0] if framed[1 : 1 + len(bare)] == bare else None


def _chosen_bos(
    bos: str, eod: str, vocabulary: dict[str, int], member: str, special: list[str]
) -> int | None:
    if not bos:
        return None
    if bos == eod:
        raise UserError(
            f"--bos '{bos}' is the end-of-document token too, so each would count as a document; give --bos '': "
            "the end of a document is the beginning of the next"
        )
    if bos not in vocabulary:
        raise UserError(f"--bos '{bos}' is not {member}{_suggest(bos, special)}")
    return vocabulary[bos]


def _fast_backend(location: Path) -> tuple[Any, str | None]:
    """The ``tokenizers.Tokenizer`` and the end-of-sequence token, if it is known."""
    if location.suffix == ".json":
        backend, eos = _read_tokenizer_json(location), None
    else:
        backend, eos = _load_with_transformers(location)
    # A tokenizer.json may ask for truncation or padding, which would cut or stuff documents.
    backend.no_truncation()
    backend.no_padding()
    return backend, eos


def _read_tokenizer_json(location: Path) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(location))
    except Exception as error:  # tokenizers raises a bare Exception for anything wrong in the file
        raise UserError(f"--tokenizer: '{location}' is not a tokenizer.json ({error})") from error


def _load_with_transformers(location: Path) -> tuple[Any, str | None]:
    from transformers import AutoTokenizer

    try:
        if location.suffix == ".gguf":
            tokenizer = AutoTokenizer.from_pretrained(str(location.parent), gguf_file=location.name)
        else:
            # A model's own code is not needed here, and transformers would ask for it on the terminal.
            tokenizer = AutoTokenizer.from_pretrained(
                str(location), local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"--tokenizer: transformers cannot load '{location}': {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            f"--tokenizer: '{location}' has no fast version ({type(tokenizer).__name__}); "
            "convert it to a tokenizer.json, or give its sentencepiece .model file"
        )
    return backend, tokenizer.eos_token


def _load_sentencepiece(location: Path, eod: str | None, bos: str | None) -> tuple[TextTokenizer, str]:
    """Returns the tokenizer and, in words, whose choice the end-of-document token is."""
    backend = _sentencepiece_backend(location)
    pieces = _pieces(backend)
    if eod is None:
        if backend.eos_id() < 0:
            raise UserError(
                f"--tokenizer '{location}' has no end-of-sequence piece; choose the end-of-document piece "
                "with --eod"
            )
        eod = backend.id_to_piece(backend.eos_id())
    special = [piece for piece, number in pieces.items() if backend.is_control(number)]
    if eod not in pieces:
        raise UserError(f"--eod '{eod}' is not a piece of '{location}'{_suggest(eod, special)}")
    bos_id = _chosen_bos(bos or "", eod, pieces, f"a piece of '{location}'", special)
    record = TokenizerRecord(
        kind="sentencepiece",
        name=str(location),
        sha256=_digest(pieces, _piece_ids(backend, [_PROBE])),
        vocab_size=backend.get_piece_size(),
        eod_id=pieces[eod],
        eod_token=eod,
        bos_id=bos_id,
        bos_token=None if bos_id is None else bos,
    )
    return SentencePieceTokenizer(backend, record), "the model's own end-of-sequence piece"


def _sentencepiece_backend(location: Path) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(location))
    except (OSError, RuntimeError) as error:
        raise UserError(f"--tokenizer: '{location}' is not a sentencepiece model ({error})") from error


def _pieces(backend: Any) -> dict[str, int]:
    return {backend.id_to_piece(number): number for number in range(backend.get_piece_size())}


def _suggest(text: str, special: list[str]) -> str:
    hint = nearest(text, special)
    return hint or (f"; its special tokens: {', '.join(special[:8])}" if special else "")


def _hugging_face_digest(backend: Any) -> str:
    return _digest(backend.get_vocab(with_added_tokens=True), _fast_ids(backend, [_PROBE]))


def _digest(vocabulary: dict[str, int], probe: list[list[int]]) -> str:
    """SHA-256 of the ids with their tokens, and of the probe's ids."""
    digest = hashlib.sha256()
    for number, token in sorted((number, token) for token, number in vocabulary.items()):
        digest.update(json.dumps([number, token]).encode() + b"\n")
    digest.update(json.dumps(probe).encode())
    return digest.hexdigest()
