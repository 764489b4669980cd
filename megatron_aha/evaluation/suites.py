"""Named sets of tasks for lm-evaluation-harness, and which of their tasks can be run here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_aha.errors import UserError, nearest


@dataclass(frozen=True)
class SuiteTask:
    """A task of a suite.

    Args:
        name: the harness's, also that of a local task file that takes its place.
        title: what people call it.
        download: the data set that the harness's own task loads from the Hub.
        runs_code: scoring runs the Python code that the model has written.
    """

    name: str
    title: str
    download: str
    runs_code: bool = False


# The tasks of the AHA paper (arXiv 2512.22562): choice, then generation.
SUITES: dict[str, tuple[SuiteTask, ...]] = {
    "aha-paper": (
        SuiteTask("mmlu", "MMLU", "cais/mmlu"),
        SuiteTask("hellaswag", "HellaSwag", "Rowan/hellaswag"),
        SuiteTask("commonsense_qa", "CSQA", "tau/commonsense_qa"),
        SuiteTask("gsm8k", "GSM8K", "openai/gsm8k"),
        SuiteTask("mbpp", "MBPP", "google-research-datasets/mbpp", runs_code=True),
        SuiteTask("longbench_multi_news", "MultiNews", "multi_news of LongBench"),
    )
}


@dataclass
class Plan:
    """What will be run.

    Args:
        tasks: names, in order.
        skipped: a sentence for each task of the suite that cannot be run here.
    """

    tasks: list[str]
    skipped: list[str]


def plan(suite: str | None, tasks: list[str], local: set[str], *, offline: bool, run_code: bool) -> Plan:
    """Returns which tasks are run: those named, and those of the suite that need nothing that is not here.

    Args:
        suite: name of a suite, or None.
        tasks: names of further tasks; they are run as they are.
        local: names that ``--tasks-dir`` defines.
        offline: nothing may be downloaded.
        run_code: code that the model writes may be run.

    Raises:
        UserError: there is no such suite.
    """
    if suite is not None and suite not in SUITES:
        raise UserError(f"--suite {suite} is not one of {', '.join(SUITES)}{nearest(suite, SUITES)}")
    made = Plan([], [])
    for task in SUITES[suite] if suite is not None else ():
        if task.name in local:
            made.tasks.append(task.name)
        elif offline:
            made.skipped.append(
                f"{task.title} is left out: it needs a download ({task.download}) and HF_HUB_OFFLINE is set; "
                f"a file in --tasks-dir with 'task: {task.name}' takes its place"
            )
        elif task.runs_code and not run_code:
            made.skipped.append(
                f"{task.title} is left out: its score comes from running the code that the model writes; "
                "--run-generated-code allows that"
            )
        else:
            made.tasks.append(task.name)
    made.tasks += [task for task in tasks if task not in made.tasks]
    return made
