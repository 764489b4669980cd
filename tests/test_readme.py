"""What the README and CONTRIBUTING name is there: files, commands, their options, the tags of TensorBoard."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_aha.cli import run
from megatron_aha.config.parse import parse_run

REPO = Path(__file__).resolve().parents[1]
PAGES = {name: (REPO / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}
README = PAGES["README.md"]
ROOTS = "megatron_aha|kernels|launch|configs|tools|tests|docs"
TOOLS = {
    "tools/convert_from_hf.py": "convert-from-hf",
    "tools/convert_to_hf.py": "convert-to-hf",
    "tools/preprocess_data.py": "preprocess",
    "tools/plot_router.py": "plot",
    "tools/generate.py": "generate",
    "tools/evaluate.py": "evaluate",
}


def _commands() -> list[list[str]]:
    """Words of every command in the README's bash blocks, continued lines joined, comments dropped."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def _arguments_of(script: str) -> list[list[str]]:
    return [words[words.index(script) + 1 :] for words in _commands() if script in words]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_it_names_exists(page: str) -> None:
    named = set(re.findall(rf"(?<![\w/.-])((?:{ROOTS})/[\w./-]*\w)(?![\w*<{{])", PAGES[page]))
    named |= {link for link in re.findall(r"\]\(([^)#]+)\)", PAGES[page]) if "://" not in link}
    assert len(named) > 5
    assert sorted(name for name in named if not (REPO / name).exists()) == []


def test_its_training_commands_parse() -> None:
    argument_lists = _arguments_of("launch/pretrain.sh")
    assert len(argument_lists) >= 2
    for arguments in argument_lists:
        parsed = parse_run(arguments)
        assert parsed.config.checkpoint.init_from == "checkpoints/llama"


@pytest.mark.parametrize("tool", TOOLS)
def test_its_tools_take_the_options_it_shows(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([TOOLS[tool], "--help"])
    known = capsys.readouterr().out
    for arguments in _arguments_of(tool):
        options = [word for word in arguments if word.startswith("--")]
        assert options
        assert [option for option in options if option not in known] == []


def test_its_bash_blocks_are_bash() -> None:
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL):
        result = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert result.returncode == 0, result.stderr


def test_its_python_block_is_python() -> None:
    for block in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        compile(block, "README.md", "exec")


def test_every_tag_it_explains_is_written() -> None:
    sources = [path.read_text() for path in (REPO / "megatron_aha").rglob("*.py")]
    tags = re.findall(r"`((?:train|valid|usage|lr|perf|memory)/[a-z_]+)", README)
    assert len(tags) > 10
    missing = [tag for tag in tags if not any(tag in source for source in sources)]
    assert missing == []


def test_it_names_the_python_that_runs_this() -> None:
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in README
