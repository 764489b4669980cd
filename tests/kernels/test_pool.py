"""Side by side, pieces of work take one thread each."""

from __future__ import annotations

import threading

import torch

from aha_kernels.pool import run_all


def test_operators_of_a_piece_run_on_one_thread_from_the_first_call_on() -> None:
    threads, both_run, seen = torch.get_num_threads(), threading.Barrier(2), []

    def piece() -> None:
        both_run.wait(timeout=60)  # on two workers, not on one after the other
        torch.ones(8) @ torch.ones(8)
        seen.append(torch.get_num_threads())

    try:
        torch.set_num_threads(2)
        for _ in range(2):
            run_all([piece, piece], threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert seen == [1, 1, 1, 1]
