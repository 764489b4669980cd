"""The tables of tools/evaluate.py: every model's numbers under its own name, and what is missing shown as missing."""

from __future__ import annotations

from megatron_aha.evaluation.perplexity import Bucket, TextResult
from megatron_aha.evaluation.table import ModelResult, TaskResult, markdown, tables


def text_of(perplexities: list[float], usage: float | None, beyond: float | None, tokens: int) -> TextResult:
    buckets = [
        Bucket(128 * row, 128 * row + 127, 100, value, usage) for row, value in enumerate(perplexities)
    ]
    return TextResult(tokens, perplexities[-1], usage, beyond, None, buckets, fingerprint=1)


def rows_of(page: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_text_by_position_with_usage_beyond_the_window_below() -> None:
    dense = ModelResult("dense", "a", None, text_of([3.0], None, None, 100))
    aha = ModelResult("aha", "b", 8, text_of([4.0, 5.5], 0.25, 0.125, 200))
    head, first, second, total, beyond = rows_of(tables([dense, aha]))
    assert head == ["positions", "tokens", "perplexity dense", "usage dense", "perplexity aha", "usage aha"]
    assert first == ["0 to 127", "100", "3.000", "1 (dense)", "4.000", "0.2500"]
    # the other tokenizer made shorter sequences
    assert second == ["128 to 255", "100", "-", "-", "5.500", "0.2500"]
    assert total == ["all", "100", "3.000", "1 (dense)", "5.500", "0.2500"]
    assert beyond == ["beyond the window", "", "", "1 (dense)", "", "0.1250"]


def test_a_model_whose_texts_stay_within_its_window_has_no_usage_beyond_it() -> None:
    aha = ModelResult("aha", "b", 512, text_of([4.0], 0.25, None, 200))
    assert rows_of(tables([aha]))[-1] == ["beyond the window", "", "", "-"]


def test_tasks_with_their_errors_and_gaps() -> None:
    dense = ModelResult("dense", "a", None)
    dense.tasks["mmlu"] = TaskResult({"acc": 0.5, "acc_stderr": 0.01}, None, None)
    aha = ModelResult("aha", "b", 8)
    aha.tasks["mmlu"] = TaskResult({"acc": 0.4, "acc_norm": 0.3, "acc_stderr": 0.0}, 0.07, 0.06)
    aha.tasks["gsm8k"] = TaskResult({"exact_match": 0.2}, 0.09, 0.08)
    assert rows_of(tables([dense, aha]))[1:] == [
        ["mmlu", "acc", "0.5000 ± 0.0100", "1 (dense)", "0.4000", "0.0700"],
        ["mmlu", "acc_norm", "-", "1 (dense)", "0.3000", "0.0700"],
        ["gsm8k", "exact_match", "-", "-", "0.2000", "0.0900"],
    ]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert markdown(["a", "long"], [["wide", "b"]]) == "| a    | long |\n|------|------|\n| wide | b    |"
