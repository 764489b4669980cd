"""Which part of which global tensor each local parameter is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from megatron_aha.models.chunks import StageModel, chunks_of

_VOCABULARY_TENSORS = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Block:
    """A rectangle that a global tensor and a local parameter share.

    Attributes:
        start: first index in the global tensor.
        local_start: first index in the local parameter.
        shape: of both.
    """

    start: tuple[int, ...]
    local_start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def local(self) -> tuple[slice, ...]:
        """Index of the block in the local parameter."""
        return tuple(slice(a, a + n) for a, n in zip(self.local_start, self.shape, strict=True))


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank as part of the whole model.

    Attributes:
        name: global name, independent of the layout.
        parameter: the local parameter (a placeholder under ZeRO-3).
        local_shape: its shape; under ZeRO-3 the gathered one.
        shape: of the global tensor, without padding of the vocabulary.
        blocks: where its parts lie; empty when it holds nothing but padding.
        replicated: every tensor-parallel rank holds the whole.
        owned: this pipeline stage is the one that speaks for it (the output layer's copy of a tied embedding is not).
    """

    name: str
    parameter: nn.Parameter
    local_shape: tuple[int, ...]
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    replicated: bool
    owned: bool


def local_parameters(model: StageModel) -> Iterator[LocalParameter]:
    """Yields every parameter of this rank, in the model's order, with its place in the global tensors."""
    tied = model.model_config.tied_embeddings
    for chunk in chunks_of(model):
        offset = get_transformer_layer_offset(chunk.config, chunk.vp_stage)
        for local_name, parameter in chunk.named_parameters():
            name = global_name(local_name, offset)
            owned = True
            if tied and name == "output_layer.weight":
                name, owned = "embedding.word_embeddings.weight", False
            yield _place(name, parameter, model, owned)


def global_name(local_name: str, layer_offset: int) -> str:
    """Returns the name with the layer's number in the whole model instead of in this pipeline stage or chunk."""
    prefix = "decoder.layers."
    if not local_name.startswith(prefix):
        return local_name
    number, rest = local_name.removeprefix(prefix).split(".", 1)
    return f"{prefix}{int(number) + layer_offset}.{rest}"


def _place(name: str, parameter: nn.Parameter, model: StageModel, owned: bool) -> LocalParameter:
    # ZeRO-3 leaves an empty placeholder and keeps the true shape beside it.
    local_shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    if not getattr(parameter, "tensor_model_parallel", False):
        origin = (0,) * len(local_shape)
        whole = Block(origin, origin, local_shape)
        return LocalParameter(name, parameter, local_shape, local_shape, (whole,), True, owned)

    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    # The gate and up halves of SwiGLU's first matrix are each split over the ranks.
    parts: int = parameter.partition_stride  # type: ignore[attr-defined]
    shape = list(local_shape)
    shape[dim] *= size
    if name in _VOCABULARY_TENSORS:
        shape[0] = model.model_config.vocab_size
    length = local_shape[dim] // parts
    blocks = []
    for part in range(parts):
        start = part * length * size + rank * length
        extent = min(length, shape[dim] - start)
        if extent > 0:
            blocks.append(_block(local_shape, dim, start, part * length, extent))
    return LocalParameter(name, parameter, local_shape, tuple(shape), tuple(blocks), False, owned)


def _block(local_shape: tuple[int, ...], dim: int, start: int, local_start: int, extent: int) -> Block:
    def along(value: int) -> tuple[int, ...]:
        return tuple(value if axis == dim else 0 for axis in range(len(local_shape)))

    shape = tuple(extent if axis == dim else length for axis, length in enumerate(local_shape))
    return Block(along(start), along(local_start), shape)
