"""The table of layouts in ``docs/parallelism.md``: what runs and what is refused, asked of the validation itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from megatron_aha.config.names import PRECISIONS
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.config.validate import problems
from megatron_aha.errors import UserError

BEGIN = "<!-- written by tools/layout_table.py; change the rules in megatron_aha/config/rules instead -->"
END = "<!-- end of what tools/layout_table.py writes -->"
ZERO_STAGES = (0, 1, 2, 3)
# Divides every size of the reference model, so that no cell is refused for a division.
RANKS = 16


class _Notes:
    """Reasons in the order in which they first appear, each under a letter."""

    def __init__(self) -> None:
        self.letters: dict[str, str] = {}

    def cell(self, config: RunConfig) -> str:
        """Returns ``yes``, or ``no`` with the letters of the reasons."""
        found = problems(config, RANKS)
        letters = [self.letters.setdefault(line, chr(ord("a") + len(self.letters))) for line in found]
        return f"no ({', '.join(letters)})" if letters else "yes"


def layout_table() -> str:
    """Returns the tables and their reasons, Markdown."""
    notes = _Notes()
    parts = [
        f"Layouts of {RANKS} ranks, fp32, with any activation recompute:",
        "",
        "| tensor | sequence parallel | pipeline | context | " + _zero_heads(),
        "|" + "---|" * (4 + len(ZERO_STAGES)),
        *_layout_rows(notes),
        "",
        "Precision, on one stage:",
        "",
        "| precision | " + _zero_heads(),
        "|" + "---|" * (1 + len(ZERO_STAGES)),
        *_precision_rows(notes),
        "",
        "Why not:",
        "",
        *(f"- ({letter}) {line}" for line, letter in notes.letters.items()),
    ]
    return "\n".join(parts)


def write_into(path: str | Path) -> bool:
    """Puts the table between the two marks of a file; returns whether that changed it.

    Raises:
        UserError: the file lacks the marks.
    """
    text = Path(path).read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{path} lacks the line {BEGIN if not begin else END}")
    updated = f"{before}{BEGIN}\n\n{layout_table()}\n\n{END}{after}"
    Path(path).write_text(updated, encoding="utf-8")
    return updated != text


def _zero_heads() -> str:
    return " | ".join(f"ZeRO {stage}" for stage in ZERO_STAGES) + " |"


def _reference() -> RunConfig:
    config = RunConfig()
    config.model.num_layers = 8
    config.model.num_attention_heads = 8
    config.model.num_query_groups = 2
    config.data.blend = ["corpus"]
    config.training.precision = "fp32"
    config.training.global_batch_size = RANKS
    return config


def _layout_rows(notes: _Notes) -> Iterator[str]:
    for tp, sp, (pp, chunks), cp in itertools.product(
        (1, 2, 4), (False, True), ((1, 1), (2, 1), (2, 2)), (1, 2)
    ):
        if sp and tp == 1:
            continue
        parallel = ParallelConfig(tp, pp, chunks, cp, sp)
        cells = [_layout_cell(notes, parallel, stage) for stage in ZERO_STAGES]
        pipeline = f"{pp}, {chunks} chunks each" if chunks > 1 else str(pp)
        yield f"| {tp} | {'on' if sp else 'off'} | {pipeline} | {cp} | {' | '.join(cells)} |"


def _layout_cell(notes: _Notes, parallel: ParallelConfig, stage: int) -> str:
    cells = set()
    for recompute in ("none", "selective", "full"):
        config = _reference()
        config.parallel = parallel
        config.training.zero_stage = stage
        config.training.recompute = recompute
        cells.add(notes.cell(config))
    # One column stands for all kinds of recompute.
    assert len(cells) == 1, cells
    return cells.pop()


def _precision_rows(notes: _Notes) -> Iterator[str]:
    for precision in PRECISIONS:
        cells = []
        for stage in ZERO_STAGES:
            config = _reference()
            config.training.precision = precision
            config.training.zero_stage = stage
            cells.append(notes.cell(config))
        yield f"| {precision} | {' | '.join(cells)} |"
