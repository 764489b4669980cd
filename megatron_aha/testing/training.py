"""Trains a tiny model in any layout and returns losses, and gradients and weights as global tensors."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_aha.checkpoint.sharding import LocalParameter, local_parameters
from megatron_aha.checkpoint.weights import initialise_weights
from megatron_aha.config.run import RunConfig
from megatron_aha.models import build_stage
from megatron_aha.parallel.layout import build_groups
from megatron_aha.testing.tiny import tiny_micro_batches
from megatron_aha.training.engine import StepResult, TrainingEngine, init_distributed


@dataclass
class TinyRun:
    """What a tiny run did.

    Attributes:
        steps: result of each step.
        gradients: global gradients of one step before the optimizer's, on rank 0 only.
        weights: global weights after the last step, on rank 0 only.
        disagreeing: names of weights of which two ranks hold different copies, on rank 0 only.
    """

    steps: list[StepResult] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    disagreeing: list[str] = field(default_factory=list)


def start_tiny(config: RunConfig) -> TrainingEngine:
    """Returns an engine with freshly drawn weights; torch.distributed must be initialised."""
    init_distributed()
    _forget_closed_models()
    gc.collect()  # an earlier engine holds its process groups, and these their threads
    build_groups(config.parallel, config.training.seed)
    model = build_stage(config.model, config.aha, config.parallel, config.training)
    initialise_weights(model, config.training.seed)
    return TrainingEngine(model, config)


def _forget_closed_models() -> None:
    """Empties what DeepSpeed's ZeRO 3 leaves behind; it would hold every earlier model and process group for good."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    FWD_MODULE_STACK.clear()
    # A cached method, inside another decorator: its object and a module are part of each key.
    method = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    inspect.getclosurevars(method).nonlocals["func"].cache_clear()


def train_tiny(
    config: RunConfig, steps: int, *, masked: bool = True, gradients_at: int | None = None
) -> TinyRun:
    """Trains for some steps on the tiny batches.

    Args:
        config: of the run.
        steps: how many.
        masked: see ``tiny_micro_batches``.
        gradients_at: step whose gradients are caught just before its optimizer step; None: the last.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    engine = start_tiny(config)
    run = TinyRun()
    for step in range(1, steps + 1):
        batches = tiny_micro_batches(
            config,
            step,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            masked=masked,
        )
        if step == (gradients_at or steps):
            catch_gradients(engine, run)
        run.steps.append(engine.train_step(step, batches))

    def weight(parameter: Tensor) -> Tensor:
        full = safe_get_full_fp32_param(parameter)
        return parameter.detach() if full is None else full

    run.weights = gather_global(engine, weight, run.disagreeing)
    engine.close()
    return run


def catch_gradients(engine: TrainingEngine, run: TinyRun) -> None:
    """Wraps DeepSpeed's step so that gradients are read when they are complete and not yet used."""
    from deepspeed.utils import safe_get_full_grad

    original, caught = engine.deepspeed.step, False

    def step(*args: Any, **kwargs: Any) -> None:
        nonlocal caught
        if engine.deepspeed.is_gradient_accumulation_boundary() and not caught:
            caught = True
            run.gradients = gather_global(engine, safe_get_full_grad)
        original(*args, **kwargs)

    engine.deepspeed.step = step


def gather_global(
    engine: TrainingEngine,
    read: Callable[[Tensor], Tensor | None],
    disagreeing: list[str] | None = None,
) -> dict[str, Tensor]:
    """Returns global tensors by name on rank 0, assembled from all ranks (a collective); fp32 on the CPU.

    Args:
        engine: whose parameters are read.
        read: the full local tensor of a parameter.
        disagreeing: on rank 0, gets the names of tensors of which two ranks hold different copies.

    Returns:
        On the other ranks an empty dictionary.
    """
    mine: list[tuple[LocalParameter, Tensor]] = []
    for local in local_parameters(engine.model):
        value = read(local.parameter)
        if value is not None:
            mine.append((local, value.detach().float().cpu()))
    # One array for all: pickling a tensor takes longer than computing one of a tiny model.
    described = [(x.name, x.shape, x.blocks, value.shape) for x, value in mine]
    flat = torch.cat([value.flatten() for _, value in mine]).numpy() if mine else None
    first = torch.distributed.get_rank() == 0
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.gather_object((described, flat), gathered if first else None)
    whole: dict[str, Tensor] = {}
    for parameters, values in gathered if first else []:
        if not parameters:
            continue
        sizes = [shape.numel() for *_, shape in parameters]
        for (name, shape, blocks, local_shape), value in zip(
            parameters, torch.from_numpy(values).split(sizes), strict=True
        ):
            value = value.view(local_shape)
            target = whole.setdefault(name, torch.full(shape, float("nan")))
            for block in blocks:
                index = tuple(slice(a, a + n) for a, n in zip(block.start, block.shape, strict=True))
                known = target[index]
                if (
                    disagreeing is not None
                    and not known.isnan().any()
                    and not torch.equal(known, value[block.local])
                ):
                    disagreeing.append(name)
                target[index] = value[block.local]
    return whole
