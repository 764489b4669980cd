"""A small dataset that training runs read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_aha.data.sidecar import TokenizerRecord

VOCABULARY = 301


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the prefix of 60 documents of 5 to 80 random ids."""
    from megatron_aha.data.writer import DatasetWriter

    prefix = str(tmp_path_factory.mktemp("dataset") / "tiny")
    random = np.random.default_rng(1)
    record = TokenizerRecord("huggingface", "tiny", "00", VOCABULARY, eod_id=0, eod_token="<eod>")
    with DatasetWriter(prefix, record) as writer:
        for _ in range(60):
            document = random.integers(1, VOCABULARY, random.integers(5, 80))
            writer.add(np.array([*document, 0]))
        writer.finish({})
    return prefix


@pytest.fixture
def options(dataset: str, tmp_path: Path) -> list[str]:
    """Returns the options of a run of the tiny model that saves and logs below ``tmp_path``."""
    return [
        "--data.blend",
        f"[{dataset}]",
        *"--data.seq_length 32 --data.split 80,20,0 --aha.window 8 --aha.init_bias 0 --aha.init_std 0.3".split(),
        *"--aha.loss_coefficient 0.1 --training.precision fp32 --training.global_batch_size 4".split(),
        *"--training.lr 0.01 --training.min_lr 0.001 --training.warmup_steps 0".split(),
        *"--training.eval_interval 5 --training.eval_steps 1 --model.hidden_dropout 0.1".split(),
        *("--checkpoint.directory", str(tmp_path / "checkpoints")),
        *("--logging.directory", str(tmp_path / "logs")),
    ]
