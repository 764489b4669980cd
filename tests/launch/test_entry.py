"""How commands end: the status, one sentence, and no silent choice of hardware."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from megatron_aha import entry
from megatron_aha.errors import UserError


def fail_with(error: BaseException) -> Callable[[Sequence[str]], int]:
    def main(argv: Sequence[str]) -> int:
        raise error

    return main


def exit_status(main: Callable[[Sequence[str]], int | None]) -> object:
    with pytest.raises(SystemExit) as caught:
        entry.run_and_exit(main, [])
    return caught.value.code


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_the_status_is_what_main_returns(returned: int | None, status: int) -> None:
    assert exit_status(lambda argv: returned) == status


def test_a_users_error_is_its_sentences_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(fail_with(UserError("one\ntwo"))) == 2
    assert capsys.readouterr().err == "error: one\nerror: two\n"


def test_other_ranks_say_who_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setattr(entry, "OTHER_RANKS_WAIT_SECONDS", 0.0)
    assert exit_status(fail_with(UserError("one"))) == 2
    assert capsys.readouterr().err == "error on rank 7: one\n"


def test_a_bug_keeps_its_traceback() -> None:
    for error in (ZeroDivisionError(), BrokenPipeError()):
        with pytest.raises(type(error)):
            entry.run_and_exit(fail_with(error), [])


def test_a_reader_that_has_enough_ends_the_command_quietly() -> None:
    lines = "from megatron_aha.entry import run_and_exit\n"
    lines += (
        "run_and_exit(lambda argv: [print(number, flush=True) for number in range(10**6)] and None, [])\n"
    )
    with subprocess.Popen([sys.executable, "-c", lines], stdout=-1, stderr=-1) as command:
        assert command.stdout is not None and command.stderr is not None
        assert command.stdout.readline() == b"0\n"
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 141


def test_deepspeed_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    entry.require_deepspeed()
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # what Python itself takes for an absent module
    with pytest.raises(UserError, match="deepspeed is not installed in .*; pip install deepspeed"):
        entry.require_deepspeed()


def test_without_a_gpu_the_cpu_is_chosen_and_deepspeed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert entry.choose_accelerator() == expected
    assert os.environ["DS_ACCELERATOR"] == expected


def test_without_a_launcher_the_process_is_a_run_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    entry.run_alone_without_launcher()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    entry.run_alone_without_launcher()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("5", "8")


def test_another_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "tpu")
    with pytest.raises(UserError, match="DS_ACCELERATOR=tpu is not supported; use cuda or cpu"):
        entry.choose_accelerator()
