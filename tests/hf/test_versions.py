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
from hf_models import make_aha, make_family, make_llama, random_tokens, save_tokenizer
from safetensors.torch import save_file

from megatron_aha.hf.exporter import export_checkpoint
from megatron_aha.hf.importer import import_checkpoint

pytestmark = pytest.mark.slow

# A folder with transformers 4.57 and what it needs beside the environment; tests/run.sh makes it.
OLD_TRANSFORMERS = os.environ.get("MEGATRON_AHA_TRANSFORMERS_4")

ROPE: dict[str, Any] = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
MODELS = {
    "dense_tied": lambda: make_llama(tie_word_embeddings=True),
    "dense_untied": lambda: make_llama(**ROPE),
    "aha_tied": lambda: make_aha(tie_word_embeddings=True, aha_bias=False),
    "aha_untied": lambda: make_aha(**ROPE, aha_num_sink_tokens=2),
    "aha_group": lambda: make_aha(aha_granularity="kv_group"),
    "aha_qwen2": lambda: make_family("qwen2", True),
    "aha_qwen3_tied": lambda: make_family("qwen3", True, tie_word_embeddings=True),
    "aha_olmo2": lambda: make_family("olmo2", True),
    "aha_olmo3": lambda: make_family("olmo3", True),
    "dense_olmo3": lambda: make_family("olmo3"),
    "aha_gemma3": lambda: make_family("gemma3_text", True),
    "dense_gemma3_tied": lambda: make_family("gemma3_text", tie_word_embeddings=True),
    "aha_mistral": lambda: make_family("mistral", True),
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
    """Loads folders in a fresh process and returns its answer; names, up to a slash, say what to expect."""
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
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((scratch / "answer.json").read_text())


def judge(answer: dict[str, Any], folders: list[str]) -> None:
    assert answer["megatron_aha"] == []
    for folder, found in zip(folders, answer["results"], strict=True):
        name = folder.split("/")[0]
        assert found["difference"] <= 1e-5, folder
        assert found["cached_equals_uncached"], folder
        assert found["tied"] == ("_tied" in name), folder
        prefix = next(
            (
                known
                for known in ("Qwen2", "Qwen3", "Olmo2", "Olmo3", "Gemma3", "Mistral")
                if known.lower() in name
            ),
            "Llama",
        )
        assert found["class"] == prefix + ("AHAForCausalLM" if "aha" in name else "ForCausalLM"), folder
        if folder == name:
            assert found["tokens"] == 300 and found["text"].startswith("w5 w6 "), folder
        if "aha" in name:
            assert found["decoder"] == prefix + "AHAModel"
            assert len(found["usage"][0]) == (2 if "group" in name else 4)


SAVED_BY_NEW = [f"{name}/saved_by_new" for name in MODELS]
SAVED_BY_OLD = [f"{name}/saved_by_old" for name in MODELS]
# 4.57 knows nothing of a plain Llama's settings as 5 saves them; ours are translated.
FOR_OLD = [folder for folder in SAVED_BY_NEW if "aha" in folder]


@pytest.fixture(scope="module")
def answers(exported: Path) -> dict[str, dict[str, Any]]:
    """Three processes one after the other, the last of which reads what the others saved."""
    found = {"new": visit(exported, [(name, "saved_by_new") for name in MODELS])}
    again = [*SAVED_BY_NEW]
    if OLD_TRANSFORMERS is not None:
        jobs = [*((name, "saved_by_old") for name in MODELS), *((folder, None) for folder in FOR_OLD)]
        found["old"] = visit(exported, jobs, OLD_TRANSFORMERS)
        again += SAVED_BY_OLD
    found["again"] = visit(exported, [(folder, None) for folder in again])
    return found


def test_exports_load_and_generate(answers: dict[str, dict[str, Any]]) -> None:
    judge(answers["new"], list(MODELS))


def test_what_was_saved_elsewhere_loads_in_a_fresh_process(answers: dict[str, dict[str, Any]]) -> None:
    judge(answers["again"], [*SAVED_BY_NEW, *(SAVED_BY_OLD if OLD_TRANSFORMERS else [])])


@pytest.mark.skipif(
    OLD_TRANSFORMERS is None, reason="MEGATRON_AHA_TRANSFORMERS_4 names no folder with transformers 4.57"
)
def test_the_oldest_supported_transformers_does_the_same(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["old"]["version"].startswith("4.57")
    judge(answers["old"], [*MODELS, *FOR_OLD])
