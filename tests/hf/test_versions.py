"""Exported models in processes of their own: the supported transformers, offline, empty module caches."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hf_models import make_aha, make_llama, random_tokens, save_tokenizer
from safetensors.torch import save_file

from megatron_aha.hf.exporter import export_checkpoint
from megatron_aha.hf.importer import import_checkpoint

# A folder with transformers 4.57 and what it needs beside the environment; tests/run.sh makes it.
OLD_TRANSFORMERS = os.environ.get("MEGATRON_AHA_TRANSFORMERS_4")

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "dense_tied": lambda: make_llama(tie_word_embeddings=True),
    "dense_untied": lambda: make_llama(rope_parameters=dict(ROPE)),
    "aha_tied": lambda: make_aha(tie_word_embeddings=True, aha_bias=False),
    "aha_untied": lambda: make_aha(rope_parameters=dict(ROPE), aha_num_sink_tokens=2),
    "aha_group": lambda: make_aha(aha_granularity="kv_group"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model exported, with what its logits must be; the sources are gone."""
    work = tmp_path_factory.mktemp("exported")
    tokens = random_tokens(2, 48)
    for name, make in MODELS.items():
        model = make()
        save_file({"tokens": tokens, "logits": model(tokens).logits.detach()}, work / f"{name}.expected")
        model.save_pretrained(work / "hf")
        save_tokenizer(work / "hf")
        folder = import_checkpoint(work / "hf", work / "ours", check=False, say=lambda _: None)
        export_checkpoint(folder, work / name, check=False, say=lambda _: None)
        shutil.rmtree(work / "hf")
        shutil.rmtree(work / "ours")
    return work


def visit(work: Path, folders: list[tuple[str, str | None]], overlay: str | None = None) -> dict[str, Any]:
    """Loads folders in a fresh process and returns its answer; names before a slash say what to expect."""
    scratch = work / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    job = {
        "folders": [
            (
                str(work / folder),
                str(work / (folder.split("/")[0] + ".expected")),
                save_to and str(work / folder.split("/")[0] / save_to),
            )
            for folder, save_to in folders
        ],
        "answer": str(scratch / "answer.json"),
    }
    (scratch / "job.json").write_text(json.dumps(job))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(scratch / "home"), "HF_MODULES_CACHE": str(scratch / "modules")}
    if overlay is not None:
        environment["PYTHONPATH"] = overlay
    script = Path(__file__).with_name("stranger.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(scratch / "job.json")],
        env=environment | {"HF_HUB_OFFLINE": "1"},
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((scratch / "answer.json").read_text())


def judge(answer: dict[str, Any], names: list[str]) -> None:
    assert answer["megatron_aha"] == []
    for name, found in zip(names, answer["results"], strict=True):
        assert found["difference"] <= 1e-5, name
        assert found["cached_equals_uncached"], name
        assert found["tied"] == ("_tied" in name), name
        assert found["class"] == ("LlamaAHAForCausalLM" if "aha" in name else "LlamaForCausalLM"), name
        if "aha" in name:
            assert found["decoder"] == "LlamaAHAModel"
            assert len(found["usage"][0]) == (2 if "group" in name else 4)


def test_exports_load_generate_and_survive_being_saved_elsewhere(exported: Path) -> None:
    names = list(MODELS)
    answer = visit(exported, [(name, "saved_by_new") for name in names])
    judge(answer, names)
    assert all(found["tokens"] == 300 for found in answer["results"])
    again = visit(exported, [(f"{name}/saved_by_new", None) for name in names])
    judge(again, names)


@pytest.mark.skipif(
    OLD_TRANSFORMERS is None, reason="MEGATRON_AHA_TRANSFORMERS_4 names no folder with transformers 4.57"
)
def test_the_oldest_supported_transformers_does_the_same(exported: Path) -> None:
    names = list(MODELS)
    answer = visit(exported, [(name, "saved_by_old") for name in names], OLD_TRANSFORMERS)
    assert answer["version"].startswith("4.57")
    judge(answer, names)
    assert all(found["tokens"] == 300 for found in answer["results"])
    # what one version saves, the other reads
    judge(visit(exported, [(f"{name}/saved_by_old", None) for name in names]), names)
    routed = [name for name in names if "aha" in name]
    for name in routed:
        if not (exported / name / "saved_by_new").exists():
            pytest.skip("the other test of this file did not run")
    judge(visit(exported, [(f"{name}/saved_by_new", None) for name in routed], OLD_TRANSFORMERS), routed)
