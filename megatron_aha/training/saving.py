"""Saving a training run in the format of ``megatron_aha.checkpoint``, at once or beside the training."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_aha.checkpoint.index import OPTIMIZER_PREFIX, RNG_PREFIX, FileRecord, Slice
from megatron_aha.checkpoint.reader import keep_newest
from megatron_aha.checkpoint.sharding import LocalParameter, local_parameters
from megatron_aha.checkpoint.tensor_file import in_files, outline_of
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
Result = TypeVar("Result")


class CheckpointSaver:
    """Writes weights, optimizer, random states and position of a run; every method is a collective over all ranks.

    Tensors are written under their global names, each by one of the ranks that hold it; a checkpoint exists once all
    ranks have written their files and rank 0 has renamed their folder. With ``checkpoint.asynchronous`` a thread writes
    a copy of this rank's tensors, and then one of rank 0 completes the checkpoint, while the training goes on; ``poll``
    takes it from the one to the other. The copy's memory is kept for the next save: new memory costs more than copying.

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
        self._copies: dict[str, Tensor] | None = {} if config.checkpoint.asynchronous else None

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
            "loss_scale": engine.loss_scale.state(),
            "world_size": torch.distributed.get_world_size(),
            "usage": None if usage is None else usage.tolist(),
            "run": _described(self._config),
        }
        files = _files(engine, self._copies)
        if checkpoint.asynchronous:
            self._pending = _PendingSave(writer, state, _Background(partial(_write, writer, list(files))))
        else:
            self._end(writer, self._complete(writer, state, _share(_write(writer, files))))

    def poll(self) -> None:
        """Takes a save on when all ranks have finished a stage of it. Raises UserError like ``save``."""
        if self._pending is None:
            return
        unfinished = torch.tensor([int(self._pending.stage.running)], device=device())
        torch.distributed.all_reduce(unfinished, op=torch.distributed.ReduceOp.MAX)
        if not int(unfinished):
            self._advance(self._pending)

    def wait(self) -> None:
        """Completes a save that is still being written. Raises UserError like ``save``."""
        while self._pending is not None:
            self._advance(self._pending)

    def _advance(self, pending: _PendingSave) -> None:
        """Waits for the stage that a save is in, and begins the next one or ends it."""
        if pending.completing is None:
            gathered = _share(pending.writing.result())
            pending.completing = _Background(partial(self._complete, pending.writer, pending.state, gathered))
        else:
            self._pending = None
            self._end(pending.writer, pending.completing.result())

    def _complete(
        self, writer: CheckpointWriter, state: dict[str, Any], gathered: list[Written]
    ) -> str | None:
        """On rank 0, makes the files of all ranks a checkpoint; returns what went wrong on any. No collective."""
        problem = next((problem for problem, _ in gathered if problem), None)
        if problem is not None or torch.distributed.get_rank() > 0:
            return problem
        checkpoint = self._config.checkpoint
        try:
            writer.finish([record for _, records in gathered for record in records], state, self._source_dir)
            if checkpoint.keep_last is not None:
                keep_newest(writer.directory, checkpoint.keep_last, checkpoint.keep_every)
        except UserError as error:
            return str(error)
        return None

    def _end(self, writer: CheckpointWriter, problem: str | None) -> None:
        """Says that a checkpoint is complete, or removes the files when any rank could not write its own."""
        problem = _share(problem)[0] or problem
        if problem is not None:
            writer.discard()
            raise UserError(f"the checkpoint of step {writer.step} could not be written: {problem}")
        self._say(f"saved {writer.directory}, step {writer.step}")


class _Background(Generic[Result]):
    """A function that runs in a thread of its own, which leaves the processors to the training where Linux lets it."""

    def __init__(self, function: Callable[[], Result]) -> None:
        executor = ThreadPoolExecutor(1, "checkpoint", initializer=_step_back)
        self._future = executor.submit(function)
        executor.shutdown(wait=False)

    @property
    def running(self) -> bool:
        """Whether the function has not returned yet."""
        return not self._future.done()

    def result(self) -> Result:
        """Waits for the function; returns, or raises, what it did."""
        return self._future.result()


def _step_back() -> None:
    """Lowers the priority of the calling thread and those it starts: an operator waits for its slowest thread."""
    if sys.platform == "linux":  # elsewhere a priority is the whole process's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


@dataclass
class _PendingSave:
    """A save in one of its stages: every rank writes, then rank 0 completes."""

    writer: CheckpointWriter
    state: dict[str, Any]
    writing: _Background[Written]
    completing: _Background[str | None] | None = None

    @property
    def stage(self) -> _Background[Any]:
        """What is going on."""
        return self.completing or self.writing


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


def _files(engine: TrainingEngine, copies: dict[str, Tensor] | None) -> Iterator[Tensors]:
    """Yields what this rank writes, file by file; all ranks of a data-parallel group must exhaust it together."""
    for parts in in_files(_tensors(engine, copies), _bytes_of, FILE_BYTES):
        yield {name: blocks for part in parts for name, blocks in part.items()}


def _tensors(engine: TrainingEngine, copies: dict[str, Tensor] | None) -> Iterator[Tensors]:
    """Yields the random states, and then what this rank writes of each parameter.

    Args:
        engine: what is saved.
        copies: memory by name, added to where missing, for copies that further training leaves alone; None: no copies.
    """
    dp_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    dp_size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    yield {
        f"{RNG_PREFIX}{torch.distributed.get_rank():05d}.{name}": state
        for name, state in random_states().items()
    }
    for index, local in enumerate(local_parameters(engine.model)):
        # Reading is a collective under ZeRO, so every rank reads even what another one writes.
        values = _values(engine.optimizer_state, local)
        if not local.owned or index % dp_size != dp_rank or (local.replicated and tp_rank > 0):
            continue
        parts: Tensors = {}
        for name, value in values.items():
            # What ZeRO has gathered does not stay on the GPU until the file is full.
            value = value.cpu() if copies is None else _copied(value, name, copies)
            parts[name] = [
                Slice(value[block.local], global_shape=local.shape, start=block.start)
                for block in local.blocks
            ]
        yield parts


def _bytes_of(tensors: Tensors) -> int:
    blocks = (block for item in tensors.values() for block in (item if isinstance(item, list) else [item]))
    return sum(outline_of(block.tensor if isinstance(block, Slice) else block).nbytes for block in blocks)


def _copied(value: Tensor, name: str, copies: dict[str, Tensor]) -> Tensor:
    """Returns a copy on the CPU, in the memory that ``copies`` has for this name."""
    if name not in copies:
        copies[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return copies[name].copy_(value)


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
