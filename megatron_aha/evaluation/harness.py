"""lm-evaluation-harness on a loaded model, task by task, with the usage of full attention of each."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_aha.errors import UserError, nearest
from megatron_aha.evaluation.table import TaskResult
from megatron_aha.hf.loading import LoadedModel
from megatron_aha.hf.usage import UsageCounter


class Harness:
    """The tasks that the installed lm-evaluation-harness and a folder of task files know.

    Args:
        tasks_dir: folder of task files (YAML, and the data they name), which take the place of the harness's own of
            the same name; None takes the harness's own alone.

    Raises:
        UserError: the harness is not installed, or the folder is missing or defines no task.
    """

    def __init__(self, tasks_dir: str | None) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise UserError(
                "--tasks and --suite need lm-evaluation-harness: pip install 'megatron-aha[eval]'"
            )
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # it tells of each task file that takes the place of its own
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        import datasets
        from lm_eval.tasks import TaskManager

        if not sys.stderr.isatty():
            datasets.disable_progress_bars()

        self._make = TaskManager
        self._folder = tasks_dir
        self._all: Any = None
        self._local: Any = None
        if tasks_dir is not None:
            if not Path(tasks_dir).is_dir():
                raise UserError(
                    f"--tasks-dir {tasks_dir} is no folder; it holds task files of the harness (YAML)"
                )
            self._local = TaskManager(include_path=tasks_dir, include_defaults=False)
            if not self.local:
                raise UserError(
                    f"--tasks-dir {tasks_dir} defines no task: none of its .yaml files has 'task: NAME'"
                )

    @property
    def local(self) -> set[str]:
        """Names that the folder of task files defines: tasks, groups and tags."""
        return set() if self._local is None else set(self._local.all_tasks)

    def manager(self, task: str) -> Any:
        """Returns the harness's index of tasks that has a task; that of its own takes many seconds to read.

        Raises:
            UserError: there is no such task.
        """
        if task in self.local:
            return self._local
        if self._all is None:
            self._all = self._make(include_path=self._folder)
        if task not in self._all.all_tasks:
            raise UserError(f"--tasks: there is no task '{task}'{nearest(task, self._all.all_tasks)}")
        return self._all

    def run(
        self,
        loaded: LoadedModel,
        tasks: Sequence[str],
        *,
        batch_size: int,
        limit: int | None,
        run_code: bool,
        say: Callable[[str], None],
    ) -> dict[str, TaskResult]:
        """Returns metrics and usage of each task.

        Args:
            loaded: the model.
            tasks: names of tasks or groups.
            batch_size: requests computed together.
            limit: documents of each task; None takes all.
            run_code: code that the model writes may be run (MBPP, HumanEval).
            say: told which task is run.

        Raises:
            UserError: a task runs code that the model writes, and `run_code` is off.
        """
        model = _adaptor(loaded, batch_size)
        results = {}
        for task in tasks:
            say(f"{loaded.name}: {task}")
            with model.counted() as usage:
                found = self._evaluate(model, task, limit, run_code)
            results[task] = TaskResult(
                metrics=_metrics(found["results"][task]),
                usage=usage.total(),
                usage_beyond_window=usage.total(beyond_window=True),
            )
        return results

    def _evaluate(self, model: Any, task: str, limit: int | None, run_code: bool) -> dict[str, Any]:
        from lm_eval import simple_evaluate

        try:
            return simple_evaluate(
                model=model,
                tasks=[task],
                task_manager=self.manager(task),
                limit=limit,
                log_samples=False,
                bootstrap_iters=0,
                confirm_run_unsafe_code=run_code,
                verbosity="ERROR",
            )
        except ValueError as error:
            if "confirm_run_unsafe_code" not in str(error):
                raise
            raise UserError(
                f"--tasks {task}: its score comes from running the code that the model writes; "
                "--run-generated-code allows that"
            ) from error


def _metrics(found: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a task by their names without the filter's, unless two filters give the same name."""
    numbers = {
        key: float(value)
        for key, value in found.items()
        if "," in key and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    filters = {key.split(",", 1)[1] for key in numbers}
    return numbers if len(filters) > 1 else {key.split(",", 1)[0]: value for key, value in numbers.items()}


def _adaptor(loaded: LoadedModel, batch_size: int) -> Any:
    """Returns the harness's own view of transformers' models, which can also count the routes."""
    from lm_eval.models.huggingface import HFLM

    class CountedLM(HFLM):
        """Its log-likelihood batches are padded with zeros on the right, which no mask marks: they are not counted."""

        usage: UsageCounter | None = None

        def counted(self) -> UsageCounter:
            """Returns a counter that sees what is computed while its ``with`` block is open."""
            self.usage = UsageCounter(self.model)
            return self.usage

        def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Any:
            if self.usage is not None:
                # a text that ends in token 0 itself loses that one token from the count
                self.usage.real = inps.flip(1).ne(0).cumsum(dim=1).flip(1) > 0
            try:
                return super()._model_call(inps, attn_mask=attn_mask, labels=labels)
            finally:
                if self.usage is not None:
                    self.usage.real = None

    with torch.inference_mode():
        return CountedLM(
            pretrained=loaded.model,
            tokenizer=loaded.needed_tokenizer(),
            batch_size=batch_size,
            backend="causal",
        )
