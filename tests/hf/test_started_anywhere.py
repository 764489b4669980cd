"""Exported models compute the same started in the root, whose folder ``kernels`` bears the name of a package of PyPI.

transformers probes for that package: 4.57 imports from it, 5 reads its version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hf_models import make_aha

from megatron_aha.hf.code import write_code

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("started.py").read_text()
# A folder with transformers 4.57, the package kernels and what they need; tests/run.sh makes it.
BESIDE = os.environ.get("MEGATRON_AHA_TRANSFORMERS_4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model; both attentions compute with its routes."""
    work = tmp_path_factory.mktemp("started")
    make_aha().save_pretrained(work / "aha")
    write_code(work / "aha", "llama")
    return work / "aha"


def linked(scratch: Path, kernels: bool, others: bool) -> Path:
    """Returns a folder for the module path with links to the package kernels, to the others beside it, or both."""
    scratch.mkdir()
    for entry in Path(str(BESIDE)).iterdir():
        if kernels if entry.name.startswith("kernels") else others:
            (scratch / entry.name).symlink_to(entry)
    return scratch


def started(where: Path, folder: Path, overlay: Path | None) -> dict[str, Any]:
    """Returns what a process prints that was started in a folder, which comes first on its module path."""
    path = [ROOT / "kernels", *([] if overlay is None else [overlay])]  # the first holds aha_kernels
    scratch = folder.parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HOME": str(scratch / "home"),
        "HF_MODULES_CACHE": str(scratch / "modules"),
    }
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, env=environment, cwd=where, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def elsewhere(folder: Path) -> dict[str, Any]:
    """What a process elsewhere sees, with the transformers of these tests and without the package kernels."""
    return started(folder, folder, None)


def test_the_root_is_as_any_other_folder(folder: Path, elsewhere: dict[str, Any]) -> None:
    assert started(ROOT, folder, None) == elsewhere
    assert elsewhere["origin"] is None and elsewhere["available"] is False


needs_beside = pytest.mark.skipif(
    BESIDE is None, reason="MEGATRON_AHA_TRANSFORMERS_4 names no folder with transformers 4.57"
)


def assert_same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert (found["sdpa"], found["aha_kernels"]) == (plain["sdpa"], plain["aha_kernels"])


@pytest.mark.slow
@needs_beside
def test_the_package_kernels_changes_nothing(folder: Path, elsewhere: dict[str, Any], tmp_path: Path) -> None:
    overlay = linked(tmp_path / "with", kernels=True, others=False)
    for where in (tmp_path, ROOT):
        found = started(where, folder, overlay)
        assert_same(found, elsewhere)
        # it is found behind the folder of its name; this version of transformers takes a newer one only
        assert found["origin"] == str(overlay / "kernels" / "__init__.py")
        assert found["available"] is False


@pytest.mark.slow
@needs_beside
def test_nor_does_it_where_transformers_takes_it(folder: Path, tmp_path: Path) -> None:
    without = linked(tmp_path / "without", kernels=False, others=True)
    overlay = linked(tmp_path / "with", kernels=True, others=True)
    plain = started(tmp_path, folder, without)
    assert plain["version"].startswith("4.57") and plain["origin"] is None
    assert started(ROOT, folder, without) == plain
    for where in (tmp_path, ROOT):
        found = started(where, folder, overlay)
        assert_same(found, plain)
        assert found["origin"] == str(overlay / "kernels" / "__init__.py")
        assert found["available"] is True and plain["available"] is False
