"""Constants of the tiny tokenizers and the runs over tiny datasets."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_aha.config.run import RunConfig
from megatron_aha.data.sidecar import TokenizerRecord

EOD = "<|endoftext|>"
ADDED = ["<tool>", "</tool>", "<think>", "</think>", "<blank>"]
TEXT = "def visible(window, token):\n    return range(max(0, token - window + 1), token + 1)\n"

WORDS = ["attention", "router", "sliding", "document", "training", "sequence", "keyword", "library"]

WriteDataset = Callable[..., str]


def run_config(blend: Sequence[str], *, steps: int = 4, eval_interval: int = 0, **data: object) -> RunConfig:
    """Returns a run of 2 sequences of 8 tokens a step over datasets of vocabulary 301."""
    config = RunConfig()
    config.data.blend = list(blend)
    config.data.seq_length = 8
    config.data.split = "100,0,0"
    for name, value in data.items():
        setattr(config.data, name, value)
    config.training.train_steps = steps
    config.training.global_batch_size = 2
    config.training.eval_interval = eval_interval
    config.training.eval_steps = 2
    return config


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Lets no file grow beyond ``size`` bytes: the system then fails writes as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@dataclass
class DyingTokenizer:
    """Kills the process that uses it, as the system does when memory runs out."""

    record: TokenizerRecord

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError
