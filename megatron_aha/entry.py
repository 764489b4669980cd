"""How every command of ours starts and fails: the accelerator chosen first, a user's error as a sentence."""

from __future__ import annotations

import importlib.util
import os
import select
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence

from megatron_aha.errors import UserError

# The launcher ends all ranks when the first one fails. Rank 0 speaks at once; the others wait this many
# seconds, so that 512 ranks with one mistake in the configuration print one sentence, and a fault of rank 7
# alone is told.
OTHER_RANKS_WAIT_SECONDS = 10.0


def run_and_exit(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> None:
    """Runs ``main(argv)`` and leaves the process.

    Exits with what ``main`` returns (None is 0), with 2 and ``error: <sentence>`` after a UserError, with
    130 after an interrupt, with 141 (a shell's status for SIGPIPE) when the reader of standard output has gone, as
    ``head`` does. Everything else is a bug of ours and keeps its traceback.
    """
    hush_libraries()
    try:
        sys.exit(main(argv) or 0)
    except UserError as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            time.sleep(OTHER_RANKS_WAIT_SECONDS)
        who = f"error on rank {rank}" if rank else "error"
        print("\n".join(f"{who}: {line}" for line in str(error).splitlines()), file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        # Python flushes standard output once more at exit, and would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _reader_is_gone() -> bool:
    """Whether the pipe behind standard output is broken, and not another one of this process."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def hush_libraries() -> None:
    """Silences what libraries say on every rank about optional packages and each other's old names."""
    for message in (
        ".*Apex.*not installed",
        "full scope is deprecated",
        "If you are using transformer_engine",
        "`torch.distributed.*is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)


def require_deepspeed() -> None:
    """Raises UserError when DeepSpeed is not installed in this Python."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            f"deepspeed is not installed in {sys.executable}, and training needs it; pip install "
            "deepspeed, or activate the environment that has it"
        )


def run_alone_without_launcher() -> None:
    """Makes this process a run of one rank, unless a launcher has said otherwise."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def choose_accelerator() -> str:
    """Returns ``cuda`` or ``cpu`` and sets ``DS_ACCELERATOR`` accordingly, before DeepSpeed reads it.

    Raises:
        UserError: ``DS_ACCELERATOR=cuda`` was asked for and this machine has no GPU.
    """
    import torch

    asked = os.environ.get("DS_ACCELERATOR")
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise UserError(
            f"DS_ACCELERATOR=cuda asks for a GPU, but torch {torch.__version__} finds none here; unset "
            "it to train on the CPU, or install a CUDA build of torch on a machine with a GPU"
        )
    if asked not in (None, "cuda", "cpu"):
        raise UserError(
            f"DS_ACCELERATOR={asked} is not supported; use cuda or cpu, or unset it to let us choose"
        )
    chosen = asked or ("cuda" if has_gpu else "cpu")
    os.environ["DS_ACCELERATOR"] = chosen
    # Megatron-core counts on it: with more connections, communication that should overlap starts late.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return chosen
