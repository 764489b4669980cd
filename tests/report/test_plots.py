"""Pictures of a run are drawn from what the run wrote, and say so when there is nothing to draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from megatron_aha.errors import UserError
from megatron_aha.report.heatmap import draw_heatmap, to_pixels
from megatron_aha.report.metrics import MetricsWriter
from megatron_aha.report.plots import draw_sorted_heads, main, write_plots
from megatron_aha.report.run_folder import read_run

TOOL = Path(__file__).parents[2] / "tools" / "plot_router.py"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    writer = MetricsWriter(tmp_path, 0)
    for step in (1, 2, 3):
        writer.scalars(
            step, {"train/lm_loss": 4.0 - step, "usage/total": 1 / step, "usage/beyond_window": 0.5 / step}
        )
        writer.usage_heatmap(step, np.full((2, 3), 1 / step))
    writer.close()
    return tmp_path


def test_a_head_on_full_attention_looks_unlike_one_that_never_is() -> None:
    usage = np.zeros((2, 2))
    dark = to_pixels(draw_heatmap(usage))
    usage[0, 0] = 1.0
    image = to_pixels(draw_heatmap(usage))
    height, width, _ = image.shape
    first, last = image[height // 4, width // 4], image[3 * height // 5, width // 2]
    assert image.dtype == np.uint8 and image.shape == dark.shape
    assert tuple(first) == (253, 231, 36) or first[0] > 200  # viridis' bright end
    assert tuple(last) == tuple(dark[3 * height // 5, width // 2])


def test_the_head_at_which_half_of_the_usage_is_reached() -> None:
    figure = draw_sorted_heads(np.array([[0.1, 0.9], [0.2, 0.4]]), step=7)
    (axes,) = figure.axes
    assert list(axes.lines[0].get_ydata()) == [0.9, 0.4, 0.2, 0.1]
    assert axes.texts[0].get_text().strip() == "half of all use: 1 of 4 heads"


def test_the_tool_writes_every_picture(run_folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(TOOL), str(run_folder)], capture_output=True, text=True, check=True
    )
    paths = [Path(line) for line in result.stdout.split()]
    names = ["heads_sorted", "heatmap", "loss_over_steps", "usage_over_steps", "usage_per_layer"]
    assert sorted(path.stem for path in paths) == names
    assert all(imread(path).std() > 0.01 for path in paths)


def test_event_files_alone_give_the_curves(run_folder: Path, tmp_path: Path) -> None:
    from_lines = read_run(run_folder).scalars
    (run_folder / "metrics.jsonl").unlink()
    from_events = read_run(run_folder).scalars
    assert from_events.keys() == from_lines.keys()
    for tag, points in from_lines.items():
        assert from_events[tag] == [(step, pytest.approx(value, rel=1e-6)) for step, value in points]


def test_another_step_can_be_chosen_and_must_exist(run_folder: Path) -> None:
    record = read_run(run_folder)
    assert run_folder / "heatmap.png" in write_plots(record, run_folder, step=2)
    with pytest.raises(UserError, match="--step 9 has no usage table; there are: 1, 2, 3"):
        write_plots(record, run_folder, step=9)


def test_a_file_where_the_pictures_should_go_is_told(run_folder: Path) -> None:
    with pytest.raises(UserError, match="--output .*metrics.jsonl is a file; name a folder"):
        main([str(run_folder), "--output", str(run_folder / "metrics.jsonl")])


def test_a_folder_without_metrics_is_one_sentence(tmp_path: Path) -> None:
    for arguments, sentence in (
        ([tmp_path], f"error: {tmp_path} holds neither metrics.jsonl nor event files"),
        ([tmp_path / "no"], f"error: {tmp_path / 'no'} is not a folder"),
    ):
        result = subprocess.run(
            [sys.executable, str(TOOL), *map(str, arguments)], capture_output=True, text=True
        )
        assert result.returncode == 2
        assert result.stderr.startswith(sentence) and result.stderr.count("\n") == 1
