"""Which step of a save a process is in, written where it can be read after the process was killed."""

from __future__ import annotations

import functools
import inspect
import mmap
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_aha.checkpoint import atomic, reader, tensor_file, writer
from megatron_aha.training import saving

_MODULES = (atomic, reader, tensor_file, writer, saving)
_WIDTH = 64
# The thread that trains, and the one that writes beside it.
_THREADS = 2
TRAINING = "training"


def record_save_steps(path: Path) -> None:
    """From now on `path` says which of this process's functions that write checkpoints runs, the innermost one."""
    path.write_bytes(b" " * _WIDTH * _THREADS)
    with path.open("r+b") as stream:
        memory = mmap.mmap(stream.fileno(), 0)
    stacks: list[list[str]] = [[""] for _ in range(_THREADS)]

    def note(thread: int) -> None:
        text = stacks[thread][-1].encode()[:_WIDTH].ljust(_WIDTH)
        memory[thread * _WIDTH : (thread + 1) * _WIDTH] = text

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            thread = int(threading.current_thread() is not threading.main_thread())
            stacks[thread].append(_described(function, args))
            note(thread)
            try:
                return function(*args, **kwargs)
            finally:
                stacks[thread].pop()
                note(thread)

        return wrapper

    _replace_functions(functools.cache(recorded))


def recorded_step(path: Path) -> str:
    """Returns the step of a save in which the process was last, or ``training``."""
    text = path.read_text()
    threads = [text[i : i + _WIDTH].strip() for i in range(0, len(text), _WIDTH)]
    return next((step for step in reversed(threads) if step), TRAINING)


def _replace_functions(recorded: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps the functions of the modules, also where one has imported them from another, and their methods."""
    names = {module.__name__ for module in _MODULES}
    owners = [*_MODULES, writer.CheckpointWriter, saving.CheckpointSaver]
    for owner in owners:
        for name, value in list(vars(owner).items()):
            mine = inspect.isfunction(value) and value.__module__ in names and not name.startswith("__")
            # What a generator does happens after it has returned.
            if mine and not inspect.isgeneratorfunction(inspect.unwrap(value)):
                setattr(owner, name, recorded(value))


def _described(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Returns the function's name and that of the file it is about, steps and numbers of ranks left out."""
    path = next((value for value in args[:2] if isinstance(value, Path)), None)
    if path is None:
        return function.__qualname__
    name = "folder of steps" if path.name == "checkpoints" else path.name
    return f"{function.__qualname__} {re.sub('[0-9]+', 'N', name)}"
