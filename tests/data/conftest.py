"""Tiny tokenizers and datasets, and a process group of one, which building indices needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from data_helpers import ADDED, EOD, TEXT, WORDS, WriteDataset

from megatron_aha.data.sidecar import TokenizerRecord


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face tokenizer of 300 ids whose ``vocab_size`` leaves out 5 added tokens; pad is eos."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[EOD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, *WORDS], trainer)
    # Settings that would cut and stuff documents if they were followed.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=40)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOD, pad_token=EOD)
    fast.add_tokens(ADDED)
    assert (fast.vocab_size, len(fast)) == (300, 305)
    folder = tmp_path_factory.mktemp("hf_tokenizer")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model of 300 pieces that falls back to bytes."""
    import sentencepiece

    prefix = tmp_path_factory.mktemp("sentencepiece") / "tiny"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, "some more words\n"] * 20),
        model_prefix=str(prefix),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


@pytest.fixture(scope="session")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo process group of this process alone."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def write_dataset(tmp_path: Path) -> WriteDataset:
    """Writes documents of ids (without end-of-document id 0) and returns the prefix."""
    from megatron_aha.data.writer import DatasetWriter

    def write(
        name: str, documents: Sequence[Sequence[int]], *, vocab_size: int = 301, identity: str = "00"
    ) -> str:
        prefix = str(tmp_path / name)
        record = TokenizerRecord("huggingface", "tiny", identity, vocab_size, eod_id=0, eod_token=EOD)
        with DatasetWriter(prefix, record) as writer:
            for document in documents:
                writer.add(np.array([*document, 0]))
            writer.finish({})
        return prefix

    return write
