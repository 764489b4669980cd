"""The report of ``--dry-run`` and the line of a step on the console."""

from __future__ import annotations

import pytest

from megatron_aha.config.parse import parse_run
from megatron_aha.report.batch import batch_arithmetic, expected_world_size
from megatron_aha.report.console import progress_line
from megatron_aha.report.dry_run import dry_run_report, print_dry_run

CLUSTER = ["--parallel.nodes", "64", "--parallel.ranks_per_node", "8", "--training.global_batch_size", "1024"]
TENSOR_2 = ["--parallel.tensor_model_parallel_size", "2", "--data.blend", "a"]


def section(report: str, title: str) -> list[str]:
    (text,) = [part for part in report.split("\n\n") if part.startswith(f"== {title}")]
    return text.splitlines()[1:]


def test_the_batch_falls_on_the_ranks_of_a_cluster_that_is_not_there() -> None:
    config = parse_run([*CLUSTER, *TENSOR_2, "--training.micro_batch_size", "2"]).config
    assert expected_world_size(config) == 512
    batch = batch_arithmetic(config, 512)
    assert (batch.data_parallel_size, batch.accumulation_steps) == (256, 2)
    assert (batch.tokens_per_step, batch.total_tokens) == (1024 * 1024, 1024 * 1024 * 1000)


def test_without_a_stated_size_the_launcher_or_the_model_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_run(TENSOR_2).config
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert expected_world_size(config) == 2
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert expected_world_size(config) == 6


def test_the_report_has_configuration_parameters_batch_memory_and_verdict() -> None:
    report = dry_run_report(parse_run([*CLUSTER, *TENSOR_2]).config, 512)
    assert "  window: 256" in section(report, "Configuration")
    assert section(report, "Parameters") == ["whole model: 93,832", "per rank: 47,108"]
    batch = section(report, "Batch")
    assert batch[0] == "ranks: 512 = tensor 2 x pipeline 1 x context 1 x data 256"
    assert batch[1] == "sequences per step: 1024 = micro-batch 1 x data 256 x accumulation 4"
    assert batch[2] == "tokens per step: 1,048,576 in sequences of 1,024"
    (memory,) = section(report, "Memory per rank, estimated (leave a fifth free)")
    assert "weights 0.1 MiB" in memory and "logits" in memory
    assert section(report, "Incompatibilities on 512 ranks") == ["- none"]


def test_every_pipeline_stage_has_its_line() -> None:
    arguments = ["--parallel.pipeline_model_parallel_size", "2", "--data.blend", "a"]
    report = dry_run_report(parse_run(arguments).config, 2)
    assert len(section(report, "Parameters")) == 3
    assert len(section(report, "Memory per rank, estimated (leave a fifth free)")) == 2


def test_impossible_sizes_are_reported_and_not_counted() -> None:
    report = dry_run_report(parse_run(["--model.num_layers", "0", "--data.blend", "a"]).config, 1)
    assert "== Parameters" not in report
    assert section(report, "Incompatibilities on 1 rank") == [
        "- --model.num_layers is 0, and must be at least 1"
    ]


def test_more_stages_than_layers_are_reported_and_not_counted() -> None:
    arguments = [
        "--model.num_layers",
        "2",
        "--parallel.pipeline_model_parallel_size",
        "3",
        "--data.blend",
        "a",
    ]
    report = dry_run_report(parse_run(arguments).config, 3)
    assert "== Parameters" not in report
    (verdict,) = section(report, "Incompatibilities on 3 ranks")
    assert "--parallel.pipeline_model_parallel_size 3 does not divide --model.num_layers 2" in verdict


def test_what_is_hardly_meant_is_remarked() -> None:
    report = dry_run_report(parse_run(["--aha.window", "1024", "--data.blend", "a"]).config, 1)
    remarks = section(report, "Remarks")
    assert any("--aha.window 1024 covers the whole of --data.seq_length 1024" in line for line in remarks)
    assert any("--checkpoint.directory is not set" in line for line in remarks)
    assert any("--data.blend: there is no dataset 'a'" in line for line in remarks)


def test_only_the_first_rank_prints_and_all_return_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse_run([]).config
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert print_dry_run(config) == 2  # no data
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert print_dry_run(parse_run(["--data.blend", "a"]).config) == 0
    assert "Incompatibilities on 2 ranks" in capsys.readouterr().out


def test_a_progress_line_has_what_was_measured_and_the_time_left() -> None:
    values = {"train/lm_loss": 3.21456, "usage/total": 0.621, "lr/model": 1e-4, "perf/step_seconds": 5.4}
    line = progress_line(7, 120, values)
    assert line == "step   7/120  loss 3.2146  usage 62.1%  lr 1.00e-04  5.40 s  10 min 10 s left"
    assert "  1.5 TFLOP/s" in progress_line(1, 1, {"perf/tflops_done": 1.5})
    assert "  12 GFLOP/s" in progress_line(1, 1, {"perf/tflops_done": 0.012})
    assert progress_line(120, 120, values).endswith("5.40 s")
    assert progress_line(1, 9, {"perf/step_seconds": 3600.0}).endswith("8 h 00 min left")
