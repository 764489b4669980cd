"""What an installation puts on disk: our two packages, whole, and nothing else at top level."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PARTS = ["megatron_aha", "kernels", "configs", "launch", "tools", "tests"]
FILES = [
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "constraints.txt",
]


def _build(kind: str, source: Path, out: Path) -> Path:
    """Returns the sdist or wheel that setuptools builds from ``source``, without a network."""
    program = f"import setuptools.build_meta as b; b.build_{kind}({str(out)!r})"
    result = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of the working tree; built from a copy, so that the tree stays clean."""
    source = tmp_path_factory.mktemp("source")
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
    for part in PARTS:
        shutil.copytree(REPO / part, source / part, ignore=unwanted)
    for file in FILES:
        shutil.copy(REPO / file, source / file)
    return _build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel_names(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in the wheel that is built from the sdist, as pip does without a wheel."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return zipfile.ZipFile(_build("wheel", source, tmp_path_factory.mktemp("wheel"))).namelist()


def _sources(root: Path) -> set[str]:
    files = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(root.parent).as_posix() for path in files}


def test_wheel_has_only_our_two_packages_at_top_level(wheel_names: list[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"megatron_aha", "aha_kernels"}


def test_wheel_has_every_file_of_both_packages(wheel_names: list[str]) -> None:
    expected = _sources(REPO / "megatron_aha") | _sources(REPO / "kernels/aha_kernels")
    assert expected - set(wheel_names) == set()


def test_sdist_has_what_a_user_runs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "constraints.txt", "launch/pretrain.sh", "launch/quickstart.sh", "tests/run.sh"}
    wanted |= {path.relative_to(REPO).as_posix() for path in (REPO / "configs").rglob("*.yaml")}
    assert wanted - names == set()
