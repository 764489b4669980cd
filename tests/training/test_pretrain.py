"""Whole runs from their options: resuming, learning rates, what is reported, and which weights are accepted."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_aha.checkpoint.format import CheckpointReader, CheckpointWriter
from megatron_aha.config.training import TrainingConfig
from megatron_aha.errors import UserError
from megatron_aha.testing.distributed import RankFailure, run_distributed
from megatron_aha.training.pretrain import main
from megatron_aha.training.schedule import learning_rate


def train(options: list[str], *more: str, ranks: int = 1) -> None:
    assert run_distributed(main, ranks, [*options, *more]) == [0] * ranks


def refusal(options: list[str], *more: str) -> str:
    """Returns the sentence with which a run is refused."""
    with pytest.raises(RankFailure, match="UserError") as caught:
        run_distributed(main, 1, [*options, *more])
    return str(caught.value).strip().splitlines()[-1].removeprefix("megatron_aha.errors.UserError: ")


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the scalars of each step, without what depends on the machine."""
    lines = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.startswith(("perf/", "memory/"))}
        for line in lines
    ]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, []),
        (
            4,
            "--parallel.tensor_model_parallel_size 2 --parallel.sequence_parallel true --training.zero_stage 2".split(),
        ),
    ],
    ids=["one process", "tp2-sp-dp2-zero2"],
)
def test_stopped_and_resumed_run_equals_the_unbroken_one_bit_for_bit(
    options: list[str], tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    steps = [*layout, "--training.train_steps", "20", "--checkpoint.save_interval", "10"]
    train(options, *steps, ranks=ranks)
    unbroken = metrics(tmp_path)
    assert [line["step"] for line in unbroken] == list(range(1, 21))
    last = tmp_path / "checkpoints" / "step_00000020"
    for file in last.iterdir():
        if file.is_file():
            file.unlink()
    last.rmdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_00000010\n")

    train(options, *steps, ranks=ranks)
    assert metrics(tmp_path) == unbroken


def test_learning_rates_survive_a_resume_with_fresh_moments_and_start_anew_in_a_new_run(
    options: list[str], tmp_path: Path
) -> None:
    training = TrainingConfig(train_steps=12, lr=0.01, min_lr=0.001, warmup_steps=4)
    unbroken = [learning_rate(training, step) for step in range(1, 13)]
    assert unbroken[3] == 0.01
    assert unbroken[11] == pytest.approx(0.001)
    assert unbroken[0] == pytest.approx(0.0025)

    schedule = "--training.train_steps 12 --training.warmup_steps 4 --aha.lr 0.02".split()
    train(options, *schedule, "--checkpoint.save_interval", "5")
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "latest").write_text("step_00000005\n")
    (checkpoints / "step_00000010").rename(tmp_path / "step_00000010")
    (checkpoints / "step_00000012").rename(tmp_path / "step_00000012")
    train(options, *schedule, "--checkpoint.fresh_optimizer", "true")
    lines = metrics(tmp_path)
    assert [line["lr/model"] for line in lines] == pytest.approx(unbroken, rel=1e-12)
    assert [line["lr/router"] for line in lines] == pytest.approx([2 * rate for rate in unbroken], rel=1e-12)

    new = [*schedule, "--checkpoint.init_from", str(checkpoints / "step_00000005")]
    new += [
        "--checkpoint.directory",
        str(tmp_path / "new"),
        "--logging.directory",
        str(tmp_path / "new" / "logs"),
    ]
    train(options, *new)
    assert [line["lr/model"] for line in metrics(tmp_path / "new")] == pytest.approx(unbroken, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_reported_router_loss_times_its_coefficient_is_its_share_of_the_total(
    options: list[str], tmp_path: Path, ranks: int
) -> None:
    train(options, "--training.train_steps", "2", ranks=ranks)
    lines = metrics(tmp_path)
    for line in lines:
        assert line["train/total_loss"] == pytest.approx(
            line["train/lm_loss"] + 0.1 * line["train/router_loss"]
        )
        assert 0 < line["usage/total"] < 1
        layers = [line[f"usage/layer_{layer:02d}"] for layer in range(2)]
        assert sum(layers) / 2 == pytest.approx(line["usage/total"])


def test_a_checkpoint_tells_the_usage_of_its_last_step_and_the_run_behind_it(
    options: list[str], tmp_path: Path
) -> None:
    train(options, "--training.train_steps", "2")
    state = CheckpointReader(tmp_path / "checkpoints").state
    assert state is not None
    drawn = json.loads((tmp_path / "logs" / "usage.jsonl").read_text().splitlines()[-1])
    assert drawn["step"] == 2
    assert state["usage"] == [pytest.approx(layer, abs=1e-6) for layer in drawn["usage"]]
    assert (state["run"]["seq_length"], state["run"]["training"]["train_steps"]) == (32, 2)
    assert state["run"]["parallel"]["tensor_model_parallel_size"] == 1
    assert str(tmp_path) not in json.dumps(state)


def test_event_files_hold_one_value_per_step_after_resuming_and_every_tag(
    options: list[str], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(options, "--training.train_steps", "5")
    train(options, "--training.train_steps", "7")
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    expected = (
        "train/lm_loss train/router_loss train/total_loss train/grad_norm lr/model lr/router usage/total "
    )
    expected += "usage/beyond_window usage/layer_00 usage/layer_01 perf/tokens_per_s perf/step_seconds "
    expected += "perf/tflops_done perf/tflops_dense_equivalent memory/peak_gib valid/lm_loss valid/perplexity"
    assert set(expected.split()) <= set(events.Tags()["scalars"])
    assert events.Tags()["images"] == ["usage/heatmap"]
    assert [event.step for event in events.Scalars("train/lm_loss")] == list(range(1, 8))
    assert [event.step for event in events.Scalars("valid/lm_loss")] == [5, 7]
    for loss, perplexity in zip(
        events.Scalars("valid/lm_loss"), events.Scalars("valid/perplexity"), strict=True
    ):
        assert perplexity.value == pytest.approx(math.exp(loss.value), rel=1e-5)


def rewrite(source: Path, target: Path, drop: str = "", rename: dict[str, str] | None = None) -> None:
    """Copies the weights of a checkpoint, without the tensors whose name contains ``drop``."""
    reader = CheckpointReader(source)
    names = [name for name in reader.weight_names() if not drop or drop not in name]
    with CheckpointWriter(target, reader.step, reader.model, reader.aha) as writer:
        tensors = {(rename or {}).get(name, name): reader.read(name) for name in names}
        writer.finish([writer.write_file("weights.safetensors", tensors)], state=reader.state)


def said_by_main(options: list[str]) -> list[str]:
    """Trains and returns what was logged."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_aha").addHandler(handler)
    assert main(options) == 0
    return messages


def test_dense_checkpoint_may_lack_routers_only_and_each_new_one_is_listed(
    options: list[str], tmp_path: Path
) -> None:
    train(options, "--training.train_steps", "1", "--aha.enabled", "false")
    dense = tmp_path / "checkpoints"
    other = ["--checkpoint.directory", str(tmp_path / "aha"), "--training.train_steps", "1"]
    said = run_distributed(said_by_main, 1, [*options, *other, "--checkpoint.init_from", str(dense)])[0]
    for layer in range(2):
        for part in ("weight", "bias"):
            assert f"new router: decoder.layers.{layer}.self_attention.router.{part}" in said
    more = [*other[:3], "2", "--checkpoint.init_from", str(dense)]
    said = run_distributed(said_by_main, 1, [*options, *more])[0]
    step = tmp_path / "aha" / "step_00000001"
    assert f"resuming from {step}, not from --checkpoint.init_from {dense}" in said

    rewrite(dense, tmp_path / "holed", drop="layers.1.mlp.linear_fc2")
    other[1] = str(tmp_path / "other")
    message = refusal(options, *other, "--checkpoint.init_from", str(tmp_path / "holed"))
    assert "lacks the weight 'decoder.layers.1.mlp.linear_fc2.weight'" in message


def test_resume_that_lacks_a_router_is_refused(options: list[str], tmp_path: Path) -> None:
    train(options, "--training.train_steps", "1")
    rewrite(tmp_path / "checkpoints", tmp_path / "holed", drop="layers.1.self_attention.router.bias")
    more = ["--training.train_steps", "2", "--checkpoint.directory", str(tmp_path / "holed")]
    assert "lacks the router weight 'decoder.layers.1.self_attention.router.bias'" in refusal(options, *more)


def test_checkpoint_of_another_model_is_refused_with_both_values(options: list[str], tmp_path: Path) -> None:
    train(options, "--training.train_steps", "1")
    more = [
        "--checkpoint.init_from",
        str(tmp_path / "checkpoints"),
        "--checkpoint.directory",
        str(tmp_path / "b"),
    ]
    message = refusal(options, *more, "--model.hidden_size", "128")
    assert "--model.hidden_size" in message
    assert "128" in message
    assert "64" in message


def test_nothing_is_read_or_written_with_pickle(options: list[str], tmp_path: Path) -> None:
    train(options, "--training.train_steps", "1")
    kinds = {path.suffix for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json", ""}


def test_unknown_checkpoint_folder_is_one_sentence(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        main([*options, "--checkpoint.init_from", str(tmp_path / "nowhere")])
