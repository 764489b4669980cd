"""The table of layouts in the documentation is what the validation says today."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_aha.config.run import RunConfig
from megatron_aha.errors import UserError
from megatron_aha.report import layout_table
from megatron_aha.report.layout_table import BEGIN, write_into

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    copy = Path(shutil.copy(PAGE, tmp_path))
    assert not write_into(copy), "run: python tools/layout_table.py"


def test_another_rule_changes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(config: RunConfig, world_size: int | None) -> list[str]:
        return ["not on Sundays"] if config.training.zero_stage == 3 else []

    monkeypatch.setattr(layout_table, "problems", rule)
    copy = Path(shutil.copy(PAGE, tmp_path))
    assert write_into(copy)
    assert "- (a) not on Sundays\n" in copy.read_text()
    assert "| 4 | on | 2 | 2 | yes | yes | yes | no (a) |" in copy.read_text()


def test_a_page_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n")
    with pytest.raises(UserError, match="lacks the line <!-- end of"):
        write_into(page)
    assert page.read_text() == f"{BEGIN}\n"
