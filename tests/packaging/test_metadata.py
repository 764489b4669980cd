"""The declared versions, extras and layer contracts agree with each other and with the tree."""

from __future__ import annotations

import importlib
import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megatron_aha

REPO = Path(__file__).resolve().parents[2]
METADATA = importlib.metadata.metadata("megatron-aha")
REQUIREMENTS = [Requirement(text) for text in METADATA.get_all("Requires-Dist", [])]


def _pins() -> list[Requirement]:
    lines = (REPO / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_installed_version_is_the_package_version() -> None:
    assert METADATA["Version"] == megatron_aha.__version__


def test_every_pin_lies_in_the_declared_range() -> None:
    ranges = {requirement.name.lower(): requirement.specifier for requirement in REQUIREMENTS}
    for pin in _pins():
        (version,) = (specifier.version for specifier in pin.specifier)
        assert pin.name.lower() not in ranges or version in ranges[pin.name.lower()], str(pin)


def test_every_dependency_of_quickstart_and_tests_is_pinned() -> None:
    pinned = {pin.name.lower() for pin in _pins()}
    tooling = {"build", "pre-commit"}
    needed = {
        requirement.name.lower()
        for requirement in REQUIREMENTS
        if requirement.marker is None or not requirement.marker.evaluate({"extra": "gpu"})
    }
    assert needed - tooling - pinned == set()


def test_both_ends_of_megatron_core_are_pinned() -> None:
    ends = {str(pin.marker): str(pin.specifier) for pin in _pins() if pin.name == "megatron-core"}
    assert ends == {'python_version < "3.12"': "==0.16.1", 'python_version >= "3.12"': "==0.19.2"}


def test_console_script_resolves() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="megatron-aha")
    module, _, function = script.value.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(("contract", "exempt"), [("transformers", {"hf"}), ("deepspeed", {"checkpoint"})])
def test_layer_contracts_name_every_part_of_the_package(contract: str, exempt: set[str]) -> None:
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]
    (named,) = (entry["source_modules"] for entry in settings["contracts"] if entry["id"] == contract)
    parts = {path.stem for path in (REPO / "megatron_aha").iterdir() if path.suffix in {"", ".py"}}
    parts -= {"__init__", "__pycache__"} | exempt
    assert {f"megatron_aha.{part}" for part in parts} - set(named) == set()
