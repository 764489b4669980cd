"""Process groups: from a launched process to Megatron-core's parallel state, on GPUs (NCCL) or CPUs (gloo)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.parallel.platform import prepare_platform


def device() -> torch.device:
    """Returns this rank's device: its GPU, or the CPU where no GPU exists."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def backend() -> str:
    """Returns the torch.distributed backend that fits the platform: ``nccl`` or ``gloo``."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def build_groups(parallel: ParallelConfig, seed: int) -> None:
    """Creates Megatron-core's process groups and seeds its random states.

    Args:
        parallel: the layout; torch.distributed must already be initialised with a fitting world size.
        seed: of dropout; data-parallel ranks get different dropout, tensor-parallel ranks agree where they must.
    """
    destroy_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_stages
        if _interleaved(parallel)
        else None,
        context_parallel_size=parallel.context_parallel_size,
    )
    # As in Megatron-LM's own trainer, so that ranks with different data draw different dropout masks.
    rank_seed = (
        seed
        + 100 * parallel_state.get_pipeline_model_parallel_rank()
        + 10 * parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )
    torch.manual_seed(rank_seed)
    model_parallel_cuda_manual_seed(rank_seed, force_reset_rng=True)


def destroy_groups() -> None:
    """Destroys Megatron-core's process groups, those of the whole world excepted.

    Megatron-core only forgets them; torch.distributed would keep them, each with three threads of gloo that wake a
    hundred times a second, as would a cache of Megatron-core's rotary embedding.
    """
    for group in parallel_state._global_process_group_list or []:
        if isinstance(group, torch.distributed.ProcessGroup):
            torch.distributed.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    RotaryEmbedding.forward.cache_clear()


def _interleaved(parallel: ParallelConfig) -> bool:
    return parallel.virtual_pipeline_stages > 1


@contextmanager
def single_process(seed: int = 1234) -> Iterator[None]:
    """Runs the body with Megatron-core initialised for one process alone; for converters and tools.

    The groups are gone afterwards; an already initialised torch.distributed of size 1 is reused and kept.
    """
    prepare_platform()
    owns_world = not torch.distributed.is_initialized()
    if owns_world:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(
            backend(), store=store, rank=0, world_size=1, timeout=timedelta(minutes=10)
        )
    build_groups(ParallelConfig(), seed)
    try:
        yield
    finally:
        destroy_groups()
        if owns_world:
            torch.distributed.destroy_process_group()
