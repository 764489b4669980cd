"""Quality beside usage, several models side by side: as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_aha.evaluation.perplexity import TextResult


@dataclass
class TaskResult:
    """What the harness found on a task.

    Args:
        metrics: by their names, ``acc``, ``exact_match``, ...; standard errors end in ``_stderr``.
        usage: share of token-heads on full attention in all that the task computed; None without routers.
        usage_beyond_window: the same over tokens that have a key beyond their window.
    """

    metrics: dict[str, float]
    usage: float | None
    usage_beyond_window: float | None


@dataclass
class ModelResult:
    """Everything measured of one model.

    Args:
        name: how its columns are called.
        path: where it was loaded from.
        window: tokens that *here* sees, the token itself included; None for a model without routers.
        text: perplexity and usage on the given text, if any was given.
        tasks: by name.
    """

    name: str
    path: str
    window: int | None
    text: TextResult | None = None
    tasks: dict[str, TaskResult] = field(default_factory=dict)


def names_of(paths: Sequence[str]) -> list[str]:
    """Returns short names for paths: their last part, or as many as it takes to tell them apart."""
    parts = [[part for part in path.replace("\\", "/").split("/") if part not in ("", ".")] for path in paths]
    for depth in range(1, max(len(part) for part in parts) + 1):
        short = ["/".join(part[-depth:]) for part in parts]
        if len(set(short)) == len(short):
            return short
    return [f"{path} ({number})" for number, path in enumerate(paths, start=1)]


def tables(results: Sequence[ModelResult]) -> str:
    """Returns perplexity by position, then tasks, a pair of columns (quality, usage) for each model."""
    parts = []
    if results[0].text is not None:
        parts.append(_text_table(results))
    if any(result.tasks for result in results):
        parts.append(_task_table(results))
    return "\n\n".join(parts)


def _text_table(results: Sequence[ModelResult]) -> str:
    texts = [result.text for result in results if result.text is not None]
    head = ["positions", "tokens"]
    for result in results:
        head += [f"perplexity {result.name}", f"usage {result.name}"]
    rows = []
    # tokenizers may differ, and with them the longest sequence
    for row, bucket in enumerate(max(texts, key=lambda text: len(text.buckets)).buckets):
        cells = [f"{bucket.first} to {bucket.last}", str(bucket.tokens)]
        for text in texts:
            found = text.buckets[row] if row < len(text.buckets) else None
            cells += ["-", "-"] if found is None else [f"{found.perplexity:.3f}", _share(found.usage)]
        rows.append(cells)
    cells = ["all", str(texts[0].tokens)]
    beyond = ["beyond the window", ""]
    for text in texts:
        cells += [f"{text.perplexity:.3f}", _share(text.usage)]
        beyond += ["", _share(text.usage_beyond_window, dense=text.usage is None)]
    page = markdown(head, [*rows, cells, beyond])
    if len({text.fingerprint for text in texts}) > 1:
        page += "\n\nThe tokenizers differ: these perplexities are of different tokens and do not compare."
    return page


def _task_table(results: Sequence[ModelResult]) -> str:
    head = ["task", "metric"]
    for result in results:
        head += [result.name, f"usage {result.name}"]
    names = {task: None for result in results for task in result.tasks}
    rows = []
    for task in names:
        found = [result.tasks.get(task) for result in results]
        metrics = {
            name: None for each in found if each for name in each.metrics if not name.endswith("_stderr")
        }
        for metric in metrics:
            cells = [task, metric]
            for each in found:
                value = each.metrics.get(metric) if each else None
                error = each.metrics.get(f"{metric}_stderr") if each else None
                cells.append("-" if value is None else f"{value:.4f}" + (f" ± {error:.4f}" if error else ""))
                cells.append("-" if each is None else _share(each.usage))
            rows.append(cells)
    return markdown(head, rows)


def _share(usage: float | None, dense: bool = True) -> str:
    if usage is None:
        return "1 (dense)" if dense else "-"
    return f"{usage:.4f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table whose columns are as wide as their widest cell."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    shown.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(shown)
