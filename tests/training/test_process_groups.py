"""Process groups that are built anew leave none of the old ones behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.parallel.layout import build_groups, single_process
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.testing.tiny import tiny_config
from megatron_aha.testing.training import train_tiny

TASKS = Path("/proc/self/task")


def threads_after_each_build(parallel: ParallelConfig, times: int) -> list[int]:
    counts = []
    for _ in range(times):
        build_groups(parallel, seed=1)
        counts.append(len(os.listdir(TASKS)))
    return counts


def threads_after_each_run(config: RunConfig, times: int) -> list[int]:
    counts = []
    for _ in range(times):
        train_tiny(config, 1)
        counts.append(len(os.listdir(TASKS)))
    return counts


def threads_around_single_process() -> tuple[int, int]:
    with single_process():
        pass  # what torch starts once, it keeps
    before = len(os.listdir(TASKS))
    for _ in range(3):
        with single_process():
            pass
    return before, len(os.listdir(TASKS))


@pytest.mark.skipif(not TASKS.is_dir(), reason="counts threads in /proc, which this system has not")
def test_building_groups_again_does_not_add_threads() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    for first, *later in run_distributed(threads_after_each_build, 2, parallel, 4):
        assert max(later) <= first, (first, later)


@pytest.mark.skipif(not TASKS.is_dir(), reason="counts threads in /proc, which this system has not")
def test_a_tiny_run_under_zero_3_leaves_no_groups_behind() -> None:
    counts = run_distributed(threads_after_each_run, 1, tiny_config(zero_stage=3), 3)[0]
    assert counts[2] <= counts[1], counts


@pytest.mark.skipif(not TASKS.is_dir(), reason="counts threads in /proc, which this system has not")
def test_single_process_leaves_no_threads() -> None:
    before, after = run_distributed(threads_around_single_process, 1)[0]
    assert after <= before
