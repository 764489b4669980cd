"""From a configuration to a model on this rank."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.families import FAMILIES
from megatron_aha.config.model import ModelConfig
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.training import TrainingConfig
from megatron_aha.errors import UserError, nearest
from megatron_aha.models.chunks import ModelChunks, StageModel
from megatron_aha.models.gpt import AHAGPTModel
from megatron_aha.models.transformer import transformer_config


def build_model(
    model: ModelConfig, aha: AHAConfig, parallel: ParallelConfig, training: TrainingConfig
) -> AHAGPTModel:
    """Returns this rank's part of the decoder in one piece, with uninitialised weights; the process groups must exist.

    Weights are then loaded by ``megatron_aha.checkpoint.weights.load_weights`` or drawn by
    ``megatron_aha.checkpoint.weights.initialise_weights``.

    Raises:
        UserError: when the model's family is unknown.
    """
    return AHAGPTModel(_transformer_config(model, parallel, training), model, aha)


def build_stage(
    model: ModelConfig, aha: AHAConfig, parallel: ParallelConfig, training: TrainingConfig
) -> StageModel:
    """Returns this rank's part of the decoder like ``build_model``, in chunks where the pipeline is interleaved."""
    chunks = parallel.virtual_pipeline_stages
    if chunks == 1:
        return build_model(model, aha, parallel, training)
    config = _transformer_config(model, parallel, training)
    return ModelChunks([AHAGPTModel(config, model, aha, number) for number in range(chunks)])


def _transformer_config(
    model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig
) -> TransformerConfig:
    if model.family not in FAMILIES:
        raise UserError(
            f"--model.family {model.family} is not one of {', '.join(FAMILIES)}"
            + nearest(model.family, FAMILIES)
        )
    return transformer_config(model, parallel, training)
