"""Continued pretraining, from the command line to the last checkpoint; one process of it per rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_aha.config.merge import model_difference, take_model_from_checkpoint
from megatron_aha.config.parse import parse_run
from megatron_aha.config.run import RunConfig
from megatron_aha.config.validate import check
from megatron_aha.data.checks import plan_splits
from megatron_aha.entry import choose_accelerator, require_deepspeed, run_alone_without_launcher
from megatron_aha.errors import UserError
from megatron_aha.report.dry_run import print_dry_run

if TYPE_CHECKING:
    from megatron_aha.checkpoint.reader import CheckpointReader
    from megatron_aha.models.chunks import StageModel

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Trains as the arguments say and returns the exit status.

    Args:
        argv: ``--config FILE`` and dotted options, see ``megatron_aha.config.parse``.

    Raises:
        UserError: a sentence on what makes the run impossible.
    """
    parsed = parse_run(argv)
    source = find_source(parsed.config)
    config = parsed.config
    if source is not None:
        config = take_model_from_checkpoint(config, parsed.explicit, source.model, source.aha)
    if parsed.dry_run:
        return print_dry_run(config)

    require_deepspeed()
    run_alone_without_launcher()
    has_gpu = choose_accelerator() == "cuda"
    check(config, int(os.environ["WORLD_SIZE"]), has_gpu)
    # Before the model is built, which can take minutes; checksums are compared later, on one rank.
    plan_splits(config, contents=False)
    _configure_process(config)
    # Only now: importing them takes seconds, which --help, --dry-run and a mistake need not wait for, and
    # deepspeed reads DS_ACCELERATOR.
    import torch

    from megatron_aha.parallel.platform import prepare_platform

    prepare_platform()
    from megatron_aha.models import build_stage
    from megatron_aha.parallel.layout import build_groups
    from megatron_aha.training.engine import init_distributed
    from megatron_aha.training.loop import TrainingLoop

    init_distributed()
    build_groups(config.parallel, config.training.seed)
    model = build_stage(config.model, config.aha, config.parallel, config.training)
    resumed = is_resumed(source, config)
    fill_weights(model, source, config, resumed)
    TrainingLoop(model, config, source, resumed).run()
    torch.distributed.destroy_process_group()
    return 0


def find_source(config: RunConfig) -> CheckpointReader | None:
    """Returns the checkpoint to start from: the run's own latest, else ``checkpoint.init_from``, else None.

    Checksums are verified once per node.

    Raises:
        UserError: a checkpoint is damaged or missing, or the run's own is of another model than the one asked for.
    """
    checksums = os.environ.get("LOCAL_RANK", "0") == "0"
    directory = config.checkpoint.directory
    if config.checkpoint.init_from is None and (directory is None or not Path(directory).is_dir()):
        return None
    from megatron_aha.checkpoint.reader import CheckpointReader, complete_steps

    if directory is not None and Path(directory).is_dir() and complete_steps(directory):
        own = CheckpointReader(directory, checksums)
        _check_same_model(own, config.checkpoint.init_from)
        return own
    if config.checkpoint.init_from is not None:
        return CheckpointReader(config.checkpoint.init_from, checksums)
    return None


def _check_same_model(own: CheckpointReader, init_from: str | None) -> None:
    """Raises UserError when a run would go on with its own model although another one is named to start from.

    What the run started from may be gone by now: then there is nothing to compare.
    """
    if init_from is None:
        return
    from megatron_aha.checkpoint.reader import CheckpointReader

    try:
        asked = CheckpointReader(init_from, checksums=False)
    except UserError:
        return
    difference = model_difference(own.model, asked.model)
    if difference is not None:
        name, ours, theirs = difference
        raise UserError(
            f"--checkpoint.directory {own.folder.parent} holds a run of another model than --checkpoint.init_from "
            f"{init_from}: {name} is {ours} there, and {theirs} in the latter; choose another "
            "--checkpoint.directory for a new run, or leave --checkpoint.init_from out to go on with the old one"
        )


def is_resumed(source: CheckpointReader | None, config: RunConfig) -> bool:
    """Returns whether the run continues its own checkpoint rather than starting from another's weights."""
    directory = config.checkpoint.directory
    return source is not None and directory is not None and source.folder.parent == Path(directory)


def fill_weights(
    model: StageModel, source: CheckpointReader | None, config: RunConfig, resumed: bool
) -> None:
    """Loads or draws every weight of this rank and says on rank 0 which it did."""
    import torch

    from megatron_aha.checkpoint.weights import initialise_weights, load_weights

    first, seed = torch.distributed.get_rank() == 0, config.training.seed
    if source is None:
        initialise_weights(model, seed)
        if first:
            logger.info("weights drawn at random (--checkpoint.init_from loads a checkpoint)")
        return
    drawn = load_weights(model, source, seed=seed, new_router=source.aha is None and not resumed)
    if first:
        named = config.checkpoint.init_from
        instead = f", not from --checkpoint.init_from {named}" if resumed and named is not None else ""
        logger.info("%s %s%s", "resuming from" if resumed else "weights from", source.folder, instead)
        for name in drawn:
            logger.info("new router: %s", name)


def _configure_process(config: RunConfig) -> None:
    import torch

    if config.training.threads_per_rank is not None:
        torch.set_num_threads(config.training.threads_per_rank)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("megatron_aha").setLevel(logging.INFO)
    # Both print once per rank what our own messages say once.
    for noisy in ("deepspeed", "DeepSpeed", "megatron"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
