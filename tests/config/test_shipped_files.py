"""Every shipped YAML loads, can run on its intended number of ranks, and has the sizes it claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_aha.config.parse import parse_run
from megatron_aha.config.validate import problems
from megatron_aha.report.batch import expected_world_size
from megatron_aha.report.parameters import total_parameters

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))

# What each file is meant to stand beside; the rest of a run's options are defaults.
LLAMA = "model/llama3.1-8b.yaml"
COMPANIONS = {
    "model/tiny.yaml": ["parallel/single.yaml"],
    "model/smollm2-135m.yaml": ["parallel/tp3_cpu.yaml", "run/quickstart.yaml"],
    "model/llama3.2-1b.yaml": ["parallel/zero3.yaml", "run/aha-paper.yaml"],
    "model/llama3.1-8b.yaml": ["parallel/tp8_zero1.yaml", "run/aha-paper.yaml"],
    "data/example.yaml": [LLAMA, "parallel/tp8_zero1.yaml"],
    "parallel/single.yaml": ["model/tiny.yaml"],
    "parallel/tp3_cpu.yaml": ["model/smollm2-135m.yaml", "run/quickstart.yaml"],
    "parallel/zero3.yaml": [LLAMA, "data/example.yaml"],
    "parallel/tp8_zero1.yaml": [LLAMA, "data/example.yaml"],
    "parallel/tp4_pp2_zero1.yaml": [LLAMA, "data/example.yaml"],
    "parallel/tp4_cp2_zero1.yaml": [LLAMA, "data/example.yaml"],
    "run/cpu-smoke.yaml": ["model/tiny.yaml", "parallel/single.yaml"],
    "run/quickstart.yaml": ["model/smollm2-135m.yaml", "parallel/tp3_cpu.yaml"],
    "run/aha-paper.yaml": [LLAMA, "data/example.yaml", "parallel/tp8_zero1.yaml"],
    "run/aha-dense-start.yaml": [LLAMA, "data/example.yaml", "parallel/tp8_zero1.yaml", "run/aha-paper.yaml"],
}


def load(*files: str) -> list[str]:
    return [word for file in files for word in ("--config", str(CONFIGS / file))]


@pytest.mark.parametrize("file", FILES)
def test_every_shipped_file_is_possible_beside_its_companions(file: str) -> None:
    options = [] if any("data/" in f for f in [file, *COMPANIONS[file]]) else ["--data.blend", "a"]
    saved = ["--checkpoint.directory", "runs/x"]
    config = parse_run([*load(*COMPANIONS[file], file), *options, *saved]).config
    assert problems(config, expected_world_size(config)) == []


def test_every_companion_list_has_its_file() -> None:
    assert sorted(COMPANIONS) == FILES


@pytest.mark.parametrize(
    ("file", "parameters"),
    [
        ("model/tiny.yaml", 93_312),
        ("model/smollm2-135m.yaml", 134_515_008),
        ("model/llama3.2-1b.yaml", 1_235_814_400),
        ("model/llama3.1-8b.yaml", 8_030_261_248),
    ],
)
def test_the_sizes_give_the_published_number_of_parameters(file: str, parameters: int) -> None:
    config = parse_run([*load(file), "--aha.enabled", "false"]).config
    assert total_parameters(config.model, config.aha) == parameters
