"""The model of one pipeline stage: in one piece, or in several chunks under interleaved (virtual) stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

from torch import nn

from megatron_aha.models.gpt import AHAGPTModel


class ModelChunks(nn.Module):
    """The chunks of one stage as one module, for DeepSpeed; Megatron-core's schedule calls each chunk itself.

    With S stages and several chunks each, stage s holds the virtual stages s, s + S, s + 2 S ... (arXiv 2104.04473).

    Args:
        chunks: in the order of their layers.
    """

    def __init__(self, chunks: Sequence[AHAGPTModel]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.config = chunks[0].config
        self.model_config = chunks[0].model_config
        self.aha_config = chunks[0].aha_config


StageModel: TypeAlias = AHAGPTModel | ModelChunks


def chunks_of(model: StageModel) -> list[AHAGPTModel]:
    """Returns the chunks of a stage in the order of their layers; a model in one piece is its only chunk."""
    return cast(list[AHAGPTModel], list(model.chunks)) if isinstance(model, ModelChunks) else [model]
