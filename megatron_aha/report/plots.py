"""Pictures of a run: who uses full attention, and how that came about."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_aha.errors import UserError
from megatron_aha.report.heatmap import save_heatmap
from megatron_aha.report.run_folder import RunRecord, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE = "#3b528b", "#d95f02"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the pictures that a run folder has data for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="plot_router.py", description=main.__doc__)
    parser.add_argument("run", help="the --logging.directory of a run")
    parser.add_argument("--output", help="folder for the PNGs; default: RUN/plots")
    parser.add_argument("--step", type=int, help="which heat map; default: the last one")
    arguments = parser.parse_args(argv)
    record = read_run(arguments.run)
    output = Path(arguments.output or Path(arguments.run) / "plots")
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file; name a folder for the pictures")
    for path in write_plots(record, output, arguments.step):
        print(path)
    return 0


def write_plots(record: RunRecord, output: Path, step: int | None = None) -> list[Path]:
    """Writes every picture the record has data for, and returns their paths.

    Args:
        record: the run.
        output: folder, created when missing.
        step: which of the usage tables; None takes the last.

    Raises:
        UserError: the run has nothing to draw, or no usage at ``step``.
    """
    figures = _scalar_figures(record)
    if step is not None and step not in record.usage:
        known = ", ".join(map(str, sorted(record.usage))) or "none"
        raise UserError(f"--step {step} has no usage table; there are: {known}")
    if not figures and not record.usage:
        raise UserError("the run has no usage to draw; was it a dense model (--aha.enabled false)?")
    output.mkdir(parents=True, exist_ok=True)
    written = []
    if record.usage:
        step = max(record.usage) if step is None else step
        usage = record.usage[step]
        save_heatmap(usage, output / "heatmap.png", step)
        written.append(output / "heatmap.png")
        figures["usage_per_layer"] = draw_layers(usage, step)
        figures["heads_sorted"] = draw_sorted_heads(usage, step)
    for name, figure in figures.items():
        figure.savefig(output / f"{name}.png")
        written.append(output / f"{name}.png")
    return written


def _scalar_figures(record: RunRecord) -> dict[str, Figure]:
    usage = {
        "all tokens": record.scalars.get("usage/total", []),
        "tokens with keys beyond the window": record.scalars.get("usage/beyond_window", []),
    }
    loss = {
        "training": record.scalars.get("train/lm_loss", []),
        "validation": record.scalars.get("valid/lm_loss", []),
    }
    figures = {}
    if any(usage.values()):
        figures["usage_over_steps"] = draw_curves(usage, "tokens on full attention", percent=True)
    if any(loss.values()):
        figures["loss_over_steps"] = draw_curves(loss, "LM loss, nats per token")
    return figures


def draw_layers(usage: np.ndarray, step: int) -> Figure:
    """Returns bars of the mean usage of each layer, from ``usage`` [layers, heads]."""
    figure, axes = _axes(f"Usage per layer, step {step}", "layer", "tokens on full attention")
    axes.bar(np.arange(usage.shape[0]), usage.mean(axis=1), color=BLUE)
    _percent(axes)
    return figure


def draw_sorted_heads(usage: np.ndarray, step: int) -> Figure:
    """Returns all heads of all layers in the order of their usage, with those marked that make half of it."""
    heads = np.sort(usage.ravel())[::-1]
    figure, axes = _axes(f"Heads by usage, step {step}", "head, most used first", "tokens on full attention")
    axes.plot(np.arange(1, heads.size + 1), heads, color=BLUE)
    axes.fill_between(np.arange(1, heads.size + 1), heads, color=BLUE, alpha=0.2)
    if heads.sum() > 0:
        half = int(np.searchsorted(np.cumsum(heads), heads.sum() / 2)) + 1
        axes.axvline(half, color=ORANGE, linewidth=1)
        axes.text(
            half, axes.get_ylim()[1] * 0.9, f"  half of all use: {half} of {heads.size} heads", color=ORANGE
        )
    _percent(axes)
    return figure


def draw_curves(curves: dict[str, list[tuple[int, float]]], label: str, percent: bool = False) -> Figure:
    """Returns curves over the steps; ``curves`` maps a name to pairs of step and value."""
    figure, axes = _axes("", "step", label)
    for (name, points), color in zip(curves.items(), (BLUE, ORANGE), strict=True):
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(
                steps, values, color=color, label=name, marker="o" if len(points) < 40 else None, markersize=3
            )
    axes.legend(frameon=False)
    if percent:
        _percent(axes)
    return figure


def _axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 3.8), dpi=110, layout="tight")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _percent(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_ylim(bottom=0)
