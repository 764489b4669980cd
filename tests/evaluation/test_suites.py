"""Which tasks of a suite run here, and why the others do not."""

from __future__ import annotations

import pytest

from megatron_aha.errors import UserError
from megatron_aha.evaluation.suites import SUITES, plan


def test_the_suite_of_the_paper_has_its_six_tasks() -> None:
    assert [task.title for task in SUITES["aha-paper"]] == [
        "MMLU",
        "HellaSwag",
        "CSQA",
        "GSM8K",
        "MBPP",
        "MultiNews",
    ]


def test_with_a_network_everything_runs_but_code_that_a_model_wrote() -> None:
    found = plan("aha-paper", ["arc_easy"], set(), offline=False, run_code=False)
    assert found.tasks == ["mmlu", "hellaswag", "commonsense_qa", "gsm8k", "longbench_multi_news", "arc_easy"]
    assert (
        len(found.skipped) == 1
        and "MBPP is left out: its score comes from running the code" in found.skipped[0]
    )
    assert "mbpp" in plan("aha-paper", [], set(), offline=False, run_code=True).tasks


def test_offline_only_local_files_run_and_the_others_are_told() -> None:
    found = plan("aha-paper", ["mmlu"], {"mmlu", "mbpp"}, offline=True, run_code=False)
    assert found.tasks == ["mmlu", "mbpp"]
    assert len(found.skipped) == 4
    assert "MultiNews is left out: it needs a download (multi_news of LongBench)" in found.skipped[-1]
    assert "'task: longbench_multi_news'" in found.skipped[-1]


def test_an_unknown_suite_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match="--suite aha_paper is not one of aha-paper; did you mean 'aha-paper'"
    ):
        plan("aha_paper", [], set(), offline=True, run_code=False)
