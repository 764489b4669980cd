"""How a weight of ours is made of weights of theirs, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_aha.config.model import ModelConfig


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Returns ``torch.cat`` of weights or, without importing torch's compiler for it, of their outlines on ``meta``."""
    if not parts[0].is_meta:
        return torch.cat(tuple(parts), dim)
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


@dataclass(frozen=True)
class Rule(ABC):
    """What one of our weights is made of.

    Args:
        theirs: their names, a star for the layer's number.
    """

    theirs: tuple[str, ...]

    @abstractmethod
    def merge(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """Returns our weight from theirs."""

    @abstractmethod
    def split(self, whole: Tensor, model: ModelConfig) -> list[Tensor]:
        """Returns their weights from ours; the exact inverse of ``merge``."""


@dataclass(frozen=True)
class Same(Rule):
    """The same weight under another name."""

    def merge(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return parts[0]

    def split(self, whole: Tensor, model: ModelConfig) -> list[Tensor]:
        return [whole]


@dataclass(frozen=True)
class Rows(Rule):
    """Weights of equal shape one above the other, such as SwiGLU's gate and up."""

    def merge(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return joined(parts)

    def split(self, whole: Tensor, model: ModelConfig) -> list[Tensor]:
        return list(whole.chunk(len(self.theirs)))


@dataclass(frozen=True)
class QKV(Rule):
    """Query, key and value projections, interleaved per key/value group as Megatron-core stores them.

    A group's rows are those of its query heads, then of its key head, then of its value head, so that any
    tensor-parallel cut between groups gives each rank whole groups. Weights ``[rows, hidden]`` and biases
    ``[rows]`` alike.
    """

    def merge(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        grouped = [part.unflatten(0, (model.num_query_groups, -1)) for part in parts]
        return joined(grouped, dim=1).flatten(0, 1)  # [(heads + 2 groups) * head_dim, ...]

    def split(self, whole: Tensor, model: ModelConfig) -> list[Tensor]:
        heads_per_group = model.num_attention_heads // model.num_query_groups
        rows = [heads_per_group * model.head_dim, model.head_dim, model.head_dim]
        grouped = whole.unflatten(0, (model.num_query_groups, -1))
        return [part.flatten(0, 1) for part in grouped.split(rows, dim=1)]
