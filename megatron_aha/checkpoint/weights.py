"""Weights into a model: from a checkpoint, or drawn at random, alike in every layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from megatron_aha.checkpoint.reader import CheckpointReader
from megatron_aha.checkpoint.sharding import LocalParameter, local_parameters
from megatron_aha.errors import UserError
from megatron_aha.models.chunks import StageModel

_ROUTER = ".self_attention.router."


def initialise_weights(model: StageModel, seed: int) -> None:
    """Draws every weight at random; the global tensors depend on the seed alone, not on the layout.

    Matrices are normal with the model's ``init_std``, those that write into the residual stream divided by
    ``sqrt(2 layers)`` as Megatron-core does; norms multiply by 1, biases are 0; routers as
    ``megatron_aha.config.aha`` says.
    """
    for local in local_parameters(model):
        _fill(local, _draw(local, model, seed))


def load_weights(model: StageModel, reader: CheckpointReader, *, seed: int, new_router: bool) -> list[str]:
    """Reads this rank's share of every weight.

    Args:
        model: before it is given to DeepSpeed.
        reader: the checkpoint.
        seed: for routers that the checkpoint lacks.
        new_router: whether routers may be missing (a dense checkpoint that starts AHA training).

    Returns:
        Global names of this rank's routers that were drawn instead of read.

    Raises:
        UserError: a weight is missing, of another shape, or is there and has no place in the model.
    """
    drawn, wanted = [], set()
    for local in local_parameters(model):
        wanted.add(local.name)
        if not reader.has(local.name):
            if not (new_router and _ROUTER in local.name):
                raise UserError(
                    f"checkpoint {reader.folder} lacks the weight '{local.name}'; it is not a checkpoint of this model"
                    if _ROUTER not in local.name
                    else f"checkpoint {reader.folder} lacks the router weight '{local.name}'; "
                    "a router is only created by --checkpoint.init_from with a dense checkpoint"
                )
            _fill(local, _draw(local, model, seed))
            drawn.append(local.name)
            continue
        if reader.shape(local.name) != local.shape:
            raise UserError(
                f"checkpoint {reader.folder} is of another model: '{local.name}' has shape "
                f"{list(reader.shape(local.name))} there and {list(local.shape)} here"
            )
        with torch.no_grad():
            local.parameter.zero_()
            for block in local.blocks:
                local.parameter[block.local].copy_(reader.read(local.name, block.start, block.shape))
    _refuse_strangers(model, reader)
    return drawn


def _refuse_strangers(model: StageModel, reader: CheckpointReader) -> None:
    """Raises UserError when the checkpoint holds weights that no layer of this model would read."""
    layers, aha = model.model_config.num_layers, model.aha_config
    # by the options and not by the layers at hand: a pipeline stage may have no router
    parts = (("weight", "bias") if aha.bias else ("weight",)) if aha.enabled else ()
    routed = {
        f"decoder.layers.{layer}{_ROUTER}{part}"
        for layer in model.model_config.routed_layers
        for part in parts
    }
    for name in reader.weight_names():
        if name.startswith("decoder.layers.") and int(name.split(".")[2]) >= layers:
            raise UserError(
                f"checkpoint {reader.folder} has the weight '{name}', the model has only {layers} layers"
            )
        if _ROUTER in name and name not in routed:
            raise UserError(
                f"checkpoint {reader.folder} has the router weight '{name}', which "
                f"--aha.enabled {aha.enabled} with --aha.bias {aha.bias} would drop"
            )
        if name == "output_layer.weight" and model.model_config.tied_embeddings:
            raise UserError(f"checkpoint {reader.folder} has '{name}', but --model.tied_embeddings is true")


def _draw(local: LocalParameter, model: StageModel, seed: int) -> Tensor:
    """Returns the whole global tensor of a parameter, fp32, from a generator of its own."""
    generator = torch.Generator().manual_seed(_seed_of(local.name, seed))
    if _ROUTER in local.name:
        if local.name.endswith(".bias"):
            return torch.full(local.shape, model.aha_config.init_bias)
        std = model.aha_config.init_std
    elif local.name.endswith("norm.weight"):
        return torch.full(local.shape, 0.0 if model.model_config.traits.zero_centred_norms else 1.0)
    elif local.name.endswith(".bias"):
        return torch.zeros(local.shape)
    else:
        std = model.model_config.init_std
        if local.name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            std /= math.sqrt(2 * model.model_config.num_layers)
    return torch.randn(local.shape, generator=generator) * std


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % (2**63)


def _fill(local: LocalParameter, whole: Tensor) -> None:
    with torch.no_grad():
        local.parameter.zero_()
        for block in local.blocks:
            index = tuple(slice(a, a + n) for a, n in zip(block.start, block.shape, strict=True))
            local.parameter[block.local].copy_(whole[index])
