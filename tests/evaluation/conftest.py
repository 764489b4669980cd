"""A dense model and one with routers as folders, beside the models they were saved from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hf"))

POSITIONS = 4096


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the models ``dense`` and ``aha``, which share their tokenizer."""
    from hf_models import make_aha, make_llama, save_tokenizer

    work = tmp_path_factory.mktemp("models")
    # room for few-shot prompts; the weights do not depend on it
    models = {
        name: make(max_position_embeddings=POSITIONS)
        for name, make in (("dense", make_llama), ("aha", make_aha))
    }
    for name, model in models.items():
        model.save_pretrained(work / name)
        save_tokenizer(work / name)
    return work
