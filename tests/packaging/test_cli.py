"""The console script: every command it lists is there, and a misspelt one is answered with the nearest."""

from __future__ import annotations

import pytest

from megatron_aha.cli import COMMANDS, run
from megatron_aha.errors import UserError


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run([command, "--help"])
    assert stop.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_a_misspelt_command_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="no command 'pretrian'; did you mean 'pretrain'"):
        run(["pretrian"])


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    printed = capsys.readouterr().out
    assert [command for command in COMMANDS if command not in printed] == []
