"""Resuming a training run from the layout-independent format of ``megatron_aha.checkpoint``."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_aha.checkpoint.index import OPTIMIZER_PREFIX, RNG_PREFIX
from megatron_aha.checkpoint.reader import CheckpointReader
from megatron_aha.checkpoint.sharding import LocalParameter, local_parameters
from megatron_aha.errors import UserError
from megatron_aha.training.engine import TrainingEngine
from megatron_aha.training.optimizer_state import MOMENTS, OptimizerState
from megatron_aha.training.random_state import restore_random_states

logger = logging.getLogger(__name__)


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
    engine.loss_scale.restore(state.get("loss_scale"))
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
