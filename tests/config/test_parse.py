"""Command lines and YAML files become one configuration, or one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_aha.config.fields import all_fields, section_class
from megatron_aha.config.parse import parse_run, to_yaml
from megatron_aha.errors import UserError


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_later_files_win_and_options_win_over_every_file_wherever_they_stand(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a.yaml", "training: {lr: 3e-4, min_lr: 3e-5, warmup_steps: 7}\naha: {window: 16}\n"
    )
    second = write(tmp_path / "b.yaml", "training: {lr: 2e-4, warmup_steps: 9}\n")
    run = parse_run(
        ["--training.warmup_steps", "11", "--config", first, "--config", second, "--local_rank=3"]
    )
    assert (run.config.training.lr, run.config.training.min_lr) == (2e-4, 3e-5)
    assert run.config.training.warmup_steps == 11
    assert run.config.aha.window == 16
    assert run.explicit == {"training.lr", "training.min_lr", "training.warmup_steps", "aha.window"}
    assert not run.dry_run


def test_values_arrive_unchanged() -> None:
    run = parse_run(
        [
            *("--checkpoint.directory", "it's 72\" $HOME (x) {y: [1]} 007"),
            *("--logging.directory", "123"),
            *("--aha.init_bias", "-1e-3"),
            *("--data.blend", "0.3", "with space/a", "0.7", "b"),
            *("--training.deepspeed.zero_optimization.overlap_comm", "true"),
            "--parallel.sequence_parallel",
            "--dry-run",
        ]
    )
    assert run.config.checkpoint.directory == "it's 72\" $HOME (x) {y: [1]} 007"
    assert run.config.logging.directory == "123"
    assert run.config.aha.init_bias == -1e-3
    assert run.config.data.blend == ["0.3", "with space/a", "0.7", "b"]
    assert run.config.training.deepspeed == {"zero_optimization": {"overlap_comm": True}}
    assert run.config.parallel.sequence_parallel is True
    assert run.dry_run


def test_weights_in_a_yaml_blend_are_numbers_and_arrive_as_texts(tmp_path: Path) -> None:
    run = parse_run(["--config", write(tmp_path / "a.yaml", "data:\n  blend: [0.3, a, 1, b]\n")])
    assert run.config.data.blend == ["0.3", "a", "1", "b"]


def test_sections_stack_key_by_key(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "training:\n  deepspeed: {x: 1e-4, zero_optimization: {y: 2}}\n")
    second = write(tmp_path / "b.yaml", "training:\n  deepspeed: {zero_optimization: {z: 3}}\nmodel:\n")
    config = parse_run(
        [
            "--config",
            first,
            "--config",
            second,
            "--model.rope_scaling.factor",
            "32",
            "--training",
            "{lr: 1e-5}",
        ]
    ).config
    assert config.training.deepspeed == {"x": 1e-4, "zero_optimization": {"y": 2, "z": 3}}
    assert config.model.rope_scaling is not None and config.model.rope_scaling.factor == 32.0
    assert config.training.lr == 1e-5


def test_null_takes_a_nested_section_away_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "model: {rope_scaling: {factor: 8}}\n")
    run = parse_run(["--config", path, "--model.rope_scaling=null"])
    assert run.config.model.rope_scaling is None
    assert run.explicit == {"model.rope_scaling"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--aha.windw", "3"], "unknown option --aha.windw; did you mean '--aha.window'?"),
        (["--trainig.lr", "3"], "unknown option --trainig.lr; did you mean '--training.lr'?"),
        (["--window=3"], "unknown option --window; did you mean '--aha.window'?"),
        (
            ["--training.tensor_model_parallel_size=2"],
            "did you mean '--parallel.tensor_model_parallel_size'?",
        ),
        (["--training.learning_rate", "3"], "did you mean '--training.lr'?"),
        (["--training.micro-batch-size", "3"], "did you mean '--training.micro_batch_size'?"),
        (["--dry-rn"], "unknown option --dry-rn; did you mean '--dry-run'?"),
        (["--dry-run", "3"], "--dry-run takes no value, but '3' follows it"),
        (["--training.lr", "fast"], "--training.lr must be a number, not 'fast'"),
        (["--training.lr="], "--training.lr must be a number, not null"),
        (["--training.zero_stage", "1.5"], "--training.zero_stage must be a whole number, not 1.5"),
        (["--model.num_layers", "null"], "--model.num_layers must be a whole number, not null"),
        (["--parallel.nodes", "two"], "--parallel.nodes must be a whole number or null, not 'two'"),
        (["--model.rope_scaling.factor", "x"], "--model.rope_scaling.factor must be a number, not 'x'"),
        (["--training.deepspeed", "3"], "--training.deepspeed must be a mapping of options, not 3"),
        (["--data.blend=[a"], "--data.blend: '[a' is not a list of texts"),
        (["--training.lr", "1", "2"], "--training.lr takes one value, but 2 follow it: 1 2"),
        (["--training.lr"], "--training.lr takes one value, but none follows it"),
        (["stray"], "'stray' stands before any option"),
        (["--config"], "--config needs a file name"),
        (["--config", "missing.yaml"], "--config missing.yaml: cannot read this file (No such file"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_run(arguments)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "training: {learning_rate: 3}",
            "unknown key 'training.learning_rate' in {path}; did you mean 'training.lr'?",
        ),
        ("trainning: {lr: 3}", "unknown key 'trainning' in {path}; did you mean 'training'?"),
        ("window: 3", "unknown key 'window' in {path}; did you mean 'aha.window'?"),
        (
            "training: {precision: 16}",
            "'training.precision' in {path} must be text, not 16: put it in quotes",
        ),
        ("training: {lr: fast}", "'training.lr' in {path} must be a number, not 'fast'"),
        (
            "parallel: {sequence_parallel: 1}",
            "'parallel.sequence_parallel' in {path} must be true or false, not 1",
        ),
        ("training: 3", "'training' in {path} must be a mapping of options, not 3"),
        ("training:\n  lr: 1\n  lr: 2\n", "--config {path}, line 3: 'lr' is given twice"),
        ("training: {lr: 1", "--config {path}, line 1: "),
        ("- a", "--config {path}: expected sections such as 'training:', found list instead"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_it(tmp_path: Path, text: str, sentence: str) -> None:
    path = write(tmp_path / "run.yaml", text)
    with pytest.raises(UserError) as caught:
        parse_run(["--config", path])
    assert sentence.format(path=path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_printed_configuration_reads_back_to_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--model.rope_scaling.factor",
        "4",
        "--data.blend",
        "0.5",
        "a",
        "0.5",
        "b",
        "--training.lr",
        "1e-7",
    ]
    config = parse_run(arguments).config
    with pytest.raises(SystemExit):
        parse_run([*arguments, "--print_config"])
    printed = capsys.readouterr().out
    assert printed == to_yaml(config)
    assert parse_run(["--config", write(tmp_path / "printed.yaml", printed)]).config == config


def test_help_has_every_option_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_run(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--aha.window WINDOW keys that *here* sees, in tokens, **including the token itself**" in text
    assert "--dry-run" in text and "--config FILE" in text
    options = [name for name, annotation in all_fields().items() if section_class(annotation) is None]
    assert [name for name in options if f"--{name} " not in text] == []
    offered_by_jsonargparse_and_not_taken = ["--model CONFIG", "--model.rope_scaling.help"]
    assert [name for name in offered_by_jsonargparse_and_not_taken if name in text] == []


def test_the_configuration_imports_nothing_heavy() -> None:
    code = (
        "import sys; from megatron_aha.config.parse import parse_run; from megatron_aha.config.validate "
        "import problems;problems(parse_run([]).config, 1); print([m for m in ('torch', 'numpy', "
        "'deepspeed') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
