"""``launch/pretrain.sh`` as the user starts it: by bash and by the deepspeed launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "launch" / "pretrain.sh")
BASH = shutil.which("bash") or "/bin/bash"
# What a shell, a launcher or a YAML reader might take apart: one value of three lines of trouble.
AWKWARD = "it's 72\" $HOME $(x) {a: [1]} \\n"


def start(*command: str, timeout: float = 200, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with this Python's tools first on the path, and without a launcher's variables."""
    env = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env | environment)


def sentence(result: subprocess.CompletedProcess[str]) -> str:
    """Returns the one error sentence of a failed command."""
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


def test_the_deepspeed_launcher_runs_it_with_python_on_every_rank_and_values_arrive_unchanged() -> None:
    result = start("deepspeed", "--num_gpus", "2", SCRIPT, "--logging.directory", AWKWARD, "--print_config")
    assert result.returncode == 0, result.stderr
    start_of_yaml = "model:\n  family:"
    assert result.stdout.count(start_of_yaml) == 2
    assert result.stdout.count(f"  directory: {yaml.safe_dump(AWKWARD).strip()}\n") == 2


def test_bash_passes_launcher_options_before_the_dashes_and_one_mistake_on_two_ranks_is_told_once() -> None:
    arguments = ["--logging.directory", AWKWARD, "--aha.windw", "3"]
    result = start(BASH, SCRIPT, "--num_gpus", "2", "--", *arguments)
    # the launcher logs the command of each rank as a Python list
    assert str(["--local_rank=1", *arguments])[1:] in result.stdout + result.stderr
    assert sentence(result) == "error: unknown option --aha.windw; did you mean '--aha.window'?"


def test_bash_prints_the_configuration_without_the_launcher() -> None:
    result = start(BASH, SCRIPT, "--num_gpus", "512", "--", "--logging.directory", AWKWARD, "--print_config")
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout)["logging"]["directory"] == AWKWARD


def test_bash_reports_on_a_cluster_that_is_not_there() -> None:
    files = ["model/llama3.1-8b", "parallel/tp8_zero1", "data/example", "run/aha-paper"]
    configs = [word for file in files for word in ("--config", str(ROOT / f"configs/{file}.yaml"))]
    result = start(
        BASH, SCRIPT, *configs, "--parallel.nodes", "64", "--parallel.ranks_per_node", "8", "--dry-run"
    )
    assert result.returncode == 0, result.stderr
    assert "ranks: 512 = tensor 8 x pipeline 1 x context 1 x data 64" in result.stdout
    assert "== Incompatibilities on 512 ranks\n- none\n" in result.stdout


def test_a_dry_run_lists_every_incompatibility_and_fails() -> None:
    arguments = [
        "--parallel.tensor_model_parallel_size",
        "3",
        "--aha.window",
        "0",
        "--data.blend",
        "a",
        "--dry-run",
    ]
    result = start(BASH, SCRIPT, *arguments)
    assert result.returncode == 2, result.stderr
    assert (
        "- --parallel.tensor_model_parallel_size 3 does not divide the model's 4 attention heads"
        in result.stdout
    )
    assert "- --aha.window is 0" in result.stdout


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such file, or not readable"),
        ("", "names no host"),
        ("# none\n\n  # here\n", "names no host"),
    ],
)
@pytest.mark.parametrize("form", ["--hostfile=", "--hostfile", "-H"])
def test_a_hostfile_that_is_missing_or_names_nobody_stops_the_run(
    tmp_path: Path, content: str | None, expected: str, form: str
) -> None:
    hostfile = tmp_path / "hosts"
    if content is not None:
        hostfile.write_text(content)
    option = [f"{form}{hostfile}"] if form.endswith("=") else [form, str(hostfile)]
    result = start(BASH, SCRIPT, *option, "--", "--data.blend", "a")
    assert sentence(result) == f"error: --hostfile {hostfile}: {expected}".replace(": names", " names")


def test_without_the_launcher_installed_bash_says_so(tmp_path: Path) -> None:
    result = start(BASH, SCRIPT, "--data.blend", "a", PATH=str(tmp_path))
    assert sentence(result).startswith(
        "error: deepspeed is not installed, and training needs it: pip install"
    )


def test_without_megatron_aha_installed_python_says_so() -> None:
    # -S leaves site-packages out, so that only the standard library and launch/ are there.
    result = start(sys.executable, "-S", SCRIPT, "--data.blend", "a", PYTHONPATH="")
    assert sentence(result).startswith(f"error: megatron_aha is not installed in {sys.executable}")


def test_a_gpu_that_is_asked_for_and_not_there_is_one_sentence() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = start(sys.executable, SCRIPT, "--data.blend", "a", DS_ACCELERATOR="cuda")
    assert sentence(result).startswith("error: DS_ACCELERATOR=cuda asks for a GPU, but torch ")


def test_the_hostfile_example_names_the_nodes_it_speaks_of() -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(ROOT / "launch" / "hostfile.example"))) == {"node1": 8, "node2": 8}


def test_the_slurm_script_outside_slurm_says_what_to_use() -> None:
    result = start(BASH, str(ROOT / "launch" / "slurm.sh"), "--data.blend", "a")
    assert sentence(result) == "error: start this with sbatch, or use launch/pretrain.sh outside SLURM"


def test_missing_data_is_one_sentence() -> None:
    result = start(sys.executable, SCRIPT, "--data.blend", "/nowhere/corpus")
    assert sentence(result).startswith("error: --data.blend: there is no dataset '/nowhere/corpus'")
