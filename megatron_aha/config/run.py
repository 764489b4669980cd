"""The whole of a run: one field per section, the same names as in YAML files and dotted options."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.checkpoint import CheckpointConfig
from megatron_aha.config.data import DataConfig
from megatron_aha.config.logging import LoggingConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.training import TrainingConfig


@dataclass
class RunConfig:
    """Everything that ``launch/pretrain.sh`` reads.

    Args:
        model: sizes of the decoder; taken from the checkpoint when one is given.
        aha: the attention variant.
        parallel: the layout.
        data: the tokens.
        training: the optimisation.
        checkpoint: weights in and out.
        logging: monitoring.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    aha: AHAConfig = field(default_factory=AHAConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
