"""Saving and resuming a training run in the layout-independent format of ``megatron_aha.checkpoint``."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_aha.checkpoint.index import OPTIMIZER_PREFIX, RNG_PREFIX, FileRecord, Slice
from megatron_aha.checkpoint.reader import CheckpointReader, keep_newest
from megatron_aha.checkpoint.sharding import LocalParameter, local_parameters
from megatron_aha.checkpoint.writer import CheckpointWriter
from megatron_aha.config.run import RunConfig
from megatron_aha.errors import UserError
from megatron_aha.training.engine import TrainingEngine
from megatron_aha.training.optimizer_state import MOMENTS, OptimizerState
from megatron_aha.training.random_state import random_states, restore_random_states

logger = logging.getLogger(__name__)

# One file holds about this many bytes; the writer's memory stays near it.
FILE_BYTES = 2**30

Tensors = dict[str, Slice | Tensor | list[Slice]]


@dataclass
class Position:
    """How far a run is.

    Attributes:
        step: optimizer steps done.
        consumed_samples: sequences consumed by them.
        data: fingerprint of the data they came from.
    """

    step: int
    consumed_samples: int
    data: str


def save_checkpoint(
    engine: TrainingEngine, config: RunConfig, position: Position, source_dir: Path | None
) -> None:
    """Writes weights, optimizer, random states and position of a run (a collective).

    Tensors are written under their global names, each by one data-parallel rank; the checkpoint exists once rank 0 has
    seen all files and renamed their folder.

    Args:
        engine: of the run.
        config: of the run; ``checkpoint.directory`` must be set.
        position: how far the run is.
        source_dir: files of the original model that are carried along.

    Raises:
        UserError: on every rank, when any rank could not write.
    """
    assert config.checkpoint.directory is not None
    writer = CheckpointWriter(
        config.checkpoint.directory, position.step, config.model, config.aha if config.aha.enabled else None
    )
    gathered = _share(_write(writer, engine))
    problem = next((problem for problem, _ in gathered if problem), None)
    if problem is None and torch.distributed.get_rank() == 0:
        state = {
            **dataclasses.asdict(position),
            "adam_steps": engine.optimizer_state.steps(),
            "recent_losses": list(engine.guard.recent_losses),
            "world_size": torch.distributed.get_world_size(),
        }
        try:
            writer.finish([record for _, records in gathered for record in records], state, source_dir)
            if config.checkpoint.keep_last is not None:
                keep_newest(
                    config.checkpoint.directory, config.checkpoint.keep_last, config.checkpoint.keep_every
                )
        except UserError as error:
            problem = str(error)
    problem = _share(problem)[0] or problem
    if problem is not None:
        writer.discard()
        raise UserError(f"the checkpoint of step {position.step} could not be written: {problem}")


def _write(writer: CheckpointWriter, engine: TrainingEngine) -> tuple[str | None, list[FileRecord]]:
    """Writes this rank's files and returns what went wrong, if anything did, and their records."""
    records: list[FileRecord] = []
    problem: str | None = None
    # A rank that cannot write goes on reading: the others need it for theirs.
    for number, tensors in enumerate(_files(engine)):
        if problem is None:
            try:
                writer.open()
                records.append(writer.write_file(_file_name(number), tensors))
            except UserError as error:
                problem = str(error)
    return problem, records


def restore_training(engine: TrainingEngine, reader: CheckpointReader, *, fresh_optimizer: bool) -> Position:
    """Restores optimizer and random states of a run whose weights are already loaded (a collective).

    Args:
        engine: built on the loaded weights.
        reader: a checkpoint that training wrote, in any layout.
        fresh_optimizer: keep step and schedule, start Adam's moments anew.

    Returns:
        How far the run was.

    Raises:
        UserError: the checkpoint was not written by training, or lacks optimizer state.
    """
    if reader.state is None:
        raise UserError(
            f"checkpoint {reader.folder} has no training state; start from it with --checkpoint.init_from"
        )
    state = reader.state
    engine.guard.recent_losses.extend(state.get("recent_losses", []))
    if not fresh_optimizer:
        engine.optimizer_state.set_steps(state["adam_steps"])
        for local in local_parameters(engine.model):
            if local.parameter.requires_grad:
                _restore_parameter(engine.optimizer_state, reader, local)
    prefix = f"{RNG_PREFIX}{torch.distributed.get_rank():05d}."
    if state["world_size"] == torch.distributed.get_world_size():
        restore_random_states({name.removeprefix(prefix): reader.read(name) for name in reader.names(prefix)})
    elif torch.distributed.get_rank() == 0:
        logger.warning(
            "%s was written by %d ranks and is resumed on %d: dropout draws anew",
            reader.folder,
            state["world_size"],
            torch.distributed.get_world_size(),
        )
    return Position(state["step"], state["consumed_samples"], state["data"])


def _restore_parameter(optimizer: OptimizerState, reader: CheckpointReader, local: LocalParameter) -> None:
    master = f"{OPTIMIZER_PREFIX}master.{local.name}"
    if reader.has(master):
        optimizer.set_master(local.parameter, _read_local(reader, master, local))
    for key in MOMENTS:
        name = f"{OPTIMIZER_PREFIX}{key}.{local.name}"
        if not reader.has(name):
            raise UserError(
                f"checkpoint {reader.folder} lacks '{name}'; resume with --checkpoint.fresh_optimizer true to start "
                "Adam's moments anew"
            )
        optimizer.set_moment(local.parameter, key, _read_local(reader, name, local))


def _read_local(reader: CheckpointReader, name: str, local: LocalParameter) -> Tensor:
    value = torch.zeros(local.local_shape)
    for block in local.blocks:
        value[block.local] = reader.read(name, block.start, block.shape)
    return value.to(local.parameter.device)


def _files(engine: TrainingEngine) -> Iterator[Tensors]:
    """Yields what this rank writes, file by file; all ranks of a data-parallel group must exhaust it together."""
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
                Slice(value[block.local].cpu(), global_shape=local.shape, start=block.start)
                for block in local.blocks
            ]
            size += value.nbytes
        if size >= FILE_BYTES:
            yield pending
            pending, size = {}, 0
    yield pending


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
