"""Everything that makes a run impossible, found before anything is built."""

from __future__ import annotations

from megatron_aha.config.rules.aha import aha_problems
from megatron_aha.config.rules.data import data_problems
from megatron_aha.config.rules.layout import layout_problems
from megatron_aha.config.rules.model import model_problems
from megatron_aha.config.rules.training import training_problems
from megatron_aha.config.run import RunConfig
from megatron_aha.errors import UserError


def problems(config: RunConfig, world_size: int | None, has_gpu: bool | None = None) -> list[str]:
    """Returns every incompatibility, one sentence each; an empty list when the run can start.

    Args:
        config: the resolved configuration, the model's sizes taken from the checkpoint already.
        world_size: ranks of the run, or None when not known: then nothing about their number is checked.
        has_gpu: whether this machine has a GPU, or None when not known (a dry run elsewhere).
    """
    return [
        *model_problems(config),
        *aha_problems(config, has_gpu),
        *layout_problems(config, world_size),
        *data_problems(config),
        *training_problems(config),
    ]


def check(config: RunConfig, world_size: int | None, has_gpu: bool | None = None) -> None:
    """Raises UserError that lists every incompatibility, one a line; see ``problems``."""
    found = problems(config, world_size, has_gpu)
    if found:
        raise UserError("\n".join(found))
