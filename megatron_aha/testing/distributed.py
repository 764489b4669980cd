"""Runs a function on several real processes over gloo, with a time-out, and returns what each rank returned."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# What every rank would import for itself, a second or two each; all of it is without state.
_PRELOAD = [
    "torch",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.datasets.gpt_dataset",
    "megatron_aha.training.engine",
    "megatron_aha.models",
]


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message holds every rank's traceback."""


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, **kwargs: Any
) -> list[Any]:
    """Runs ``function(*args, **kwargs)`` on ``world_size`` fresh processes that share a gloo process group.

    Processes are forked from a server that has imported the heavy libraries once, so a run starts in well under a
    second and no state outlives it.

    Args:
        function: importable by name; torch.distributed is initialised when it is called.
        world_size: ranks.
        timeout: seconds until all ranks are killed.

    Returns:
        The return values in the order of the ranks.

    Raises:
        RankFailure: when any rank raised, died or was still running at the time-out.
    """
    import torch

    # Served by this process, so that it outlives a killed rank; a store in a file is polled every 10 ms.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank_main,
                args=(function, rank, world_size, store.port, folder, timeout, args, kwargs),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        _wait(processes, timeout)
        return _collect(Path(folder), [process.exitcode for process in processes])


def _wait(processes: list[Any], timeout: float) -> None:
    """Waits for all to end; when one fails or time is up, ends the others."""
    deadline = time.monotonic() + timeout + 10
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in processes):
            # The survivors wait for the failed one; their own tracebacks arrive shortly or never.
            deadline = min(deadline, time.monotonic() + 3)
        time.sleep(0.01)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _collect(folder: Path, exit_codes: list[int | None]) -> list[Any]:
    import torch

    problems = []
    results = []
    for rank, code in enumerate(exit_codes):
        error = folder / f"{rank}.error"
        if code == 0:
            results.append(torch.load(folder / f"{rank}.pt", weights_only=False))
        else:
            text = error.read_text() if error.exists() else "no traceback: killed or timed out\n"
            problems.append(f"rank {rank} (exit code {code}):\n{text}")
    if problems:
        raise RankFailure("\n".join(problems))
    return results


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    timeout: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    error_file = Path(folder) / f"{rank}.error"
    with error_file.open("w") as log:
        # Writes all stacks shortly before the parent would kill this rank.
        faulthandler.dump_traceback_later(timeout, exit=True, file=log)
        try:
            import torch

            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
            torch.set_num_threads(1)
            # The libraries live as long as the process: collecting a model need not look at them each time.
            gc.freeze()
            from megatron_aha.parallel.layout import prepare_platform

            prepare_platform()
            store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
            torch.distributed.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
            torch.save(function(*args, **kwargs), f"{folder}/{rank}.pt")
            faulthandler.cancel_dump_traceback_later()
        except BaseException:
            log.write(traceback.format_exc())
            log.flush()
            os._exit(1)
    # Interpreter shutdown would run DeepSpeed's and gloo's finalisers, which can wait for ranks that are gone.
    os._exit(0)
