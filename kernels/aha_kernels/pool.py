"""Runs independent pieces of CPU work side by side, each on one thread.

PyTorch splits each operator among its threads; for operators of a tenth of a millisecond the fork and join
of every one cost more than they gain. Whole KV groups per thread need no joins. The results do not depend
on the threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def _pool(workers: int) -> ThreadPoolExecutor:
    """Returns the pool of this process with that many workers, whose operators run on one thread each."""
    with _lock:
        if workers not in _pools:
            ready = threading.Barrier(workers + 1)

            def start() -> None:
                torch.get_num_threads()  # what a thread's first operator would do later, and undo the next line
                torch.set_num_threads(1)  # of this worker alone
                ready.wait()

            pool = ThreadPoolExecutor(workers, "aha_kernels", initializer=start)
            for _ in range(workers):
                pool.submit(int)
            ready.wait()
            _pools[workers] = pool
        return _pools[workers]


def _without_autograd(task: Callable[[], None]) -> None:
    """Runs a task as the operator that made it runs: below autograd, which is a setting of each thread."""
    with torch.no_grad():
        task()


def run_all(tasks: Sequence[Callable[[], None]], threads: int) -> None:
    """Runs every task, on at most ``threads`` threads; raises what the first failing task raised."""
    workers = min(threads, len(tasks))
    if workers <= 1:
        for task in tasks:
            task()
        return
    own = torch.get_num_threads()
    pool = _pool(workers)
    torch.set_num_threads(own)  # the workers' setting is also the default of threads yet to come
    for future in [pool.submit(_without_autograd, task) for task in tasks]:
        future.result()


os.register_at_fork(after_in_child=_pools.clear)  # a child process has no threads but its own
