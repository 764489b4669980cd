"""Usage of full attention as a picture: one row per layer, one column per head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_heatmap(usage: np.ndarray, step: int | None = None) -> Figure:
    """Returns a matplotlib figure of ``usage`` [layers, heads], shares of tokens in 0..1.

    Colours go from 0 to 1 in every picture, so that two steps compare, by the square root, because a
    trained model uses a few percent. A head that never uses full attention has the darkest colour.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    layers, heads = usage.shape
    cell = 0.22  # inches
    figure = Figure(
        figsize=(max(4.5, heads * cell + 2.0), max(3.0, layers * cell + 1.3)), dpi=110, layout="tight"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        usage, cmap="viridis", norm=PowerNorm(0.5, 0.0, 1.0), aspect="auto", interpolation="nearest"
    )
    axes.set(xlabel="head", ylabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    when = "" if step is None else f", step {step}"
    axes.set_title(f"tokens on full attention{when}: {usage.mean():.1%}", fontsize=10)
    bar = figure.colorbar(image, ax=axes, ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1])
    bar.ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    return figure


def to_pixels(figure: Figure) -> np.ndarray:
    """Returns the figure as uint8 [height, width, 3]."""
    canvas = figure.canvas
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[attr-defined]


def save_heatmap(usage: np.ndarray, path: str | Path, step: int | None = None) -> None:
    """Writes ``usage`` [layers, heads] as a PNG (or what the file's suffix says)."""
    draw_heatmap(usage, step).savefig(path)
