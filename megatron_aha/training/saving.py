"""Saving a training run in the format of ``megatron_aha.checkpoint``, at once or beside the training."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_aha.checkpoint.index import OPTIMIZER_PREFIX, RNG_PREFIX, FileRecord, Slice
from megatron_aha.checkpoint.reader import keep_newest
from megatron_aha.checkpoint.sharding import LocalParameter, local_parameters
from megatron_aha.checkpoint.writer import CheckpointWriter
from megatron_aha.config.run import RunConfig
from megatron_aha.errors import UserError
from megatron_aha.parallel.layout import device
from megatron_aha.training.engine import TrainingEngine
from megatron_aha.training.optimizer_state import MOMENTS, OptimizerState
from megatron_aha.training.random_state import random_states
from megatron_aha.training.restoring import Position

# One file holds about this many bytes; the writer's memory stays near it, unless it writes beside the training.
FILE_BYTES = 2**30

Tensors = dict[str, Slice | Tensor | list[Slice]]
Written = tuple[str | None, list[FileRecord]]


class CheckpointSaver:
    """Writes weights, optimizer, random states and position of a run; every method is a collective over all ranks.

    Tensors are written under their global names, each by one of the ranks that hold it; a checkpoint exists once all
    ranks have written their files and rank 0 has renamed their folder. With ``checkpoint.asynchronous`` a thread writes
    a copy of this rank's tensors while the training goes on, and ``poll`` completes the checkpoint some steps later.

    Args:
        config: of the run; ``checkpoint.directory`` must be set.
        source_dir: files of the original model that are carried along.
        say: gets a line when a checkpoint is complete.
    """

    def __init__(self, config: RunConfig, source_dir: Path | None, say: Callable[[str], None]) -> None:
        self._config = config
        self._source_dir = source_dir
        self._say = say
        self._pending: _PendingSave | None = None

    def save(self, engine: TrainingEngine, position: Position, usage: Tensor | None = None) -> None:
        """Saves the run as it is now, after any save that is still being written.

        Args:
            engine: what is saved.
            position: how far the run is.
            usage: share of tokens on full attention in the last step, ``[layers, routers]``; None when not known.

        Raises:
            UserError: on every rank, when any rank could not write this checkpoint or the one before.
        """
        self.wait()
        checkpoint, aha = self._config.checkpoint, self._config.aha
        assert checkpoint.directory is not None
        writer = CheckpointWriter(
            checkpoint.directory, position.step, self._config.model, aha if aha.enabled else None
        )
        state = {
            **dataclasses.asdict(position),
            "adam_steps": engine.optimizer_state.steps(),
            "recent_losses": list(engine.guard.recent_losses),
            "world_size": torch.distributed.get_world_size(),
            "usage": None if usage is None else usage.tolist(),
            "run": _described(self._config),
        }
        files = _files(engine, copied=checkpoint.asynchronous)
        if checkpoint.asynchronous:
            self._pending = _PendingSave(writer, state, list(files))
        else:
            self._complete(writer, state, _write(writer, files))

    def poll(self) -> None:
        """Completes a save that all ranks have finished writing. Raises UserError like ``save``."""
        if self._pending is None:
            return
        unfinished = torch.tensor([int(self._pending.thread.is_alive())], device=device())
        torch.distributed.all_reduce(unfinished, op=torch.distributed.ReduceOp.MAX)
        if not int(unfinished):
            self.wait()

    def wait(self) -> None:
        """Completes a save that is still being written. Raises UserError like ``save``."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._complete(pending.writer, pending.state, pending.written())

    def _complete(self, writer: CheckpointWriter, state: dict[str, Any], written: Written) -> None:
        """Makes the files of all ranks a checkpoint, or removes them when any rank could not write its own."""
        gathered = _share(written)
        problem = next((problem for problem, _ in gathered if problem), None)
        if problem is None and torch.distributed.get_rank() == 0:
            checkpoint = self._config.checkpoint
            try:
                writer.finish(
                    [record for _, records in gathered for record in records], state, self._source_dir
                )
                if checkpoint.keep_last is not None:
                    keep_newest(writer.directory, checkpoint.keep_last, checkpoint.keep_every)
            except UserError as error:
                problem = str(error)
        problem = _share(problem)[0] or problem
        if problem is not None:
            writer.discard()
            raise UserError(f"the checkpoint of step {writer.step} could not be written: {problem}")
        self._say(f"saved {writer.directory}, step {writer.step}")


class _PendingSave:
    """A thread that writes this rank's files."""

    def __init__(self, writer: CheckpointWriter, state: dict[str, Any], files: list[Tensors]) -> None:
        self.writer = writer
        self.state = state
        self._written: Written | None = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(files,), name="checkpoint", daemon=True)
        self.thread.start()

    def written(self) -> Written:
        """Waits for the thread and returns what went wrong, if anything did, and the files' records."""
        self.thread.join()
        if self._error is not None:
            raise self._error
        assert self._written is not None
        return self._written

    def _run(self, files: list[Tensors]) -> None:
        try:
            self._written = _write(self.writer, files)
        except BaseException as error:  # raised again in the training's own thread
            self._error = error


def _described(config: RunConfig) -> dict[str, Any]:
    """Returns what a model card tells of the run; no paths."""
    sections = {
        name: dataclasses.asdict(section)
        for name, section in (("training", config.training), ("parallel", config.parallel))
    }
    return {**sections, "seq_length": config.data.seq_length}


def _write(writer: CheckpointWriter, files: Iterator[Tensors] | list[Tensors]) -> Written:
    """Writes this rank's files and returns what went wrong, if anything did, and their records."""
    records: list[FileRecord] = []
    problem: str | None = None
    # A rank that cannot write goes on reading: the others need it for theirs.
    for number, tensors in enumerate(files):
        if problem is None:
            try:
                writer.open()
                records.append(writer.write_file(_file_name(number), tensors))
            except UserError as error:
                problem = str(error)
    return problem, records


def _files(engine: TrainingEngine, *, copied: bool) -> Iterator[Tensors]:
    """Yields what this rank writes, file by file; all ranks of a data-parallel group must exhaust it together.

    With ``copied`` the tensors are copies, which further training leaves alone.
    """
    dp_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    dp_size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    pending: Tensors = {
        f"{RNG_PREFIX}{torch.distributed.get_rank():05d}.{name}": state
        for name, state in random_states().items()
    }
    size = 0
    for index, local in enumerate(local_parameters(engine.model)):
        # Reading is a collective under ZeRO, so every rank reads even what another one writes.
        values = _values(engine.optimizer_state, local)
        if not local.owned or index % dp_size != dp_rank or (local.replicated and tp_rank > 0):
            continue
        for name, value in values.items():
            pending[name] = [
                Slice(_on_cpu(value[block.local], copied), global_shape=local.shape, start=block.start)
                for block in local.blocks
            ]
            size += value.nbytes
        if size >= FILE_BYTES:
            yield pending
            pending, size = {}, 0
    yield pending


def _on_cpu(value: Tensor, copied: bool) -> Tensor:
    """Returns the tensor on the CPU; one that is there already is copied on demand."""
    return value.clone() if copied and value.device.type == "cpu" else value.cpu()


def _values(optimizer: OptimizerState, local: LocalParameter) -> dict[str, Tensor]:
    """Returns weight, master and moments of one parameter by name (a collective over the data-parallel group)."""
    parameter = local.parameter
    if not parameter.requires_grad:
        return {local.name: _gathered(parameter)}
    master = optimizer.master(parameter)
    values = {local.name: master.to(parameter.dtype)}
    if parameter.dtype != torch.float32:
        values[f"{OPTIMIZER_PREFIX}master.{local.name}"] = master
    for key in MOMENTS:
        values[f"{OPTIMIZER_PREFIX}{key}.{local.name}"] = optimizer.moment(parameter, key)
    return {name: value.detach().reshape(local.local_shape) for name, value in values.items()}


def _gathered(parameter: Any) -> Tensor:
    """Returns the whole of a frozen parameter, which ZeRO-3 partitions without an optimizer state."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _file_name(number: int) -> str:
    return f"rank{torch.distributed.get_rank():05d}-{number:03d}.safetensors"


def _share(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered
