"""The line that a step leaves on the console."""

from __future__ import annotations


def progress_line(step: int, train_steps: int, values: dict[str, float]) -> str:
    """Returns one line such as ``step  12/20  loss 3.214  usage 62.1%  lr 1.0e-04  |g| 1.31  5.4 s  ...``.

    Args:
        step: the step just done, from 1.
        train_steps: of the whole run.
        values: the scalars of the step by their tags (see ``MetricsWriter``); those missing are left out.
    """
    parts = [f"step {step:>{len(str(train_steps))}}/{train_steps}"]
    for tag, form in _COLUMNS:
        if tag in values:
            value = values[tag]
            parts.append(form.format(_operations(value) if tag == "perf/tflops_done" else value))
    if "perf/step_seconds" in values and step < train_steps:
        parts.append(f"{_duration((train_steps - step) * values['perf/step_seconds'])} left")
    return "  ".join(parts)


_COLUMNS = (
    ("train/lm_loss", "loss {:.4f}"),
    ("train/router_loss", "router {:.4f}"),
    ("valid/lm_loss", "valid {:.4f}"),
    ("usage/total", "usage {:.1%}"),
    ("usage/beyond_window", "beyond window {:.1%}"),
    ("lr/model", "lr {:.2e}"),
    ("train/grad_norm", "norm {:.3f}"),
    ("perf/step_seconds", "{:.2f} s"),
    ("perf/tokens_per_s", "{:,.0f} tokens/s"),
    ("perf/tflops_done", "{}FLOP/s"),
    ("memory/peak_gib", "{:.1f} GiB"),
)


def _operations(tera: float) -> str:
    """Returns ``1.3 T``, or ``0.12 G`` for what a CPU does."""
    return f"{tera:.3g} T" if tera >= 0.1 else f"{tera * 1000:.3g} G"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
