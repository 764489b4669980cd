"""What the two commands say when something is missing: one sentence with a remedy, and status 2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """As much of a fresh clone as the commands read before they install."""
    clone = tmp_path / "a clone"
    for name in ("launch/setup_env.sh", "tests/run.sh", "setup.py", "pyproject.toml", "constraints.txt"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, clone / name)
    return clone


def _executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def _run(clone: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in the clone, without any active environment but the one given."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "CONDA_PREFIX"}
    }
    command = words or ("bash", "tests/run.sh")
    return subprocess.run(
        command,
        cwd=clone,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def _function(clone: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    prologue = f"set -euo pipefail; source launch/setup_env.sh; PY={sys.executable}; "
    return _run(clone, "bash", "-c", prologue + script, **environment)


def test_an_unsupported_python_is_refused_with_the_supported_ones(clone: Path) -> None:
    old = _executable(clone / "old/python3.10", "exit 1")
    result = _run(clone, PYTHON=str(old))
    assert result.returncode == 2
    assert "no Python 3.11, 3.12 or 3.13 found" in result.stderr and str(old) in result.stderr
    assert not (clone / ".venv").exists()


def test_an_active_environment_without_a_supported_python_is_refused(clone: Path) -> None:
    _executable(clone / "env/bin/python", "exit 1")
    result = _run(clone, VIRTUAL_ENV=str(clone / "env"))
    assert result.returncode == 2
    assert f"the active environment {clone / 'env'} has no working Python" in result.stderr


def test_a_broken_venv_folder_is_named(clone: Path) -> None:
    _executable(clone / ".venv/bin/python", "exit 1")
    result = _run(clone)
    assert result.returncode == 2
    assert "rm -r .venv" in result.stderr


def test_a_full_disk_is_noticed_before_anything_is_installed(clone: Path) -> None:
    _executable(clone / "bin/df", "printf 'Filesystem 1024-blocks Used Available\\ndisk 9 9 1048576\\n'")
    path = f"{clone / 'bin'}:{os.environ['PATH']}"
    result = _function(clone, f"VIRTUAL_ENV={clone.as_posix()!r}; install_project gguf", PATH=path)
    assert result.returncode == 2
    assert "the installation needs 4 GiB" in result.stderr and "1 GiB are free" in result.stderr


def test_pip_failing_without_a_compiler_says_both(clone: Path) -> None:
    _executable(clone / "bin/python", f'[ "$2" != pip ] && exec {sys.executable} "$@"; exit 1')
    for tool in ("df", "awk", "grep", "sed", "uname", "date", "dirname", "bash"):
        (clone / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    script = (
        f"PY='{clone}/bin/python' VIRTUAL_ENV='{clone}'; install_cpu_torch() {{ :; }}; install_project gguf"
    )
    result = _function(clone, script, PATH=str(clone / "bin"))
    assert result.returncode == 2
    assert "pip failed" in result.stderr and "No C compiler was found" in result.stderr


def test_what_is_installed_already_is_not_installed_again(clone: Path) -> None:
    stamped = (
        'VIRTUAL_ENV="$PWD"; for e in gguf dev; do echo "$(fingerprint) $e"; done >.megatron_aha-installed; '
    )
    assert "already installed" in _function(clone, stamped + "install_project dev").stdout
    changed = (
        stamped + "echo numpy==0.0.1 >>constraints.txt; pip_install() { return 1; }; install_project dev"
    )
    assert "pip failed" in _function(clone, changed).stderr


def test_a_damaged_model_file_is_refused(clone: Path) -> None:
    (clone / "model.gguf").write_bytes(b"GGUF")
    result = _function(clone, 'find_smollm2() { echo "$PWD/model.gguf"; }; install_smollm2')
    assert result.returncode == 2
    assert "instead of b179c9523d0e6a0f" in result.stderr
