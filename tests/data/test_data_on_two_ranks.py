"""Data on two real processes: both read their part, and both fail when one sees a fault."""

from __future__ import annotations

from pathlib import Path

import torch
from data_helpers import WriteDataset, run_config

from megatron_aha.data.batches import build_batch_sources
from megatron_aha.errors import UserError
from megatron_aha.testing.distributed import run_distributed


def read_steps(prefix: str, split: str, cache: str) -> list[torch.Tensor] | str:
    import torch.distributed as dist

    config = run_config([prefix], split=split, eval_interval=1, cache_dir=cache)
    try:
        train, valid = build_batch_sources(config, dist.get_rank(), dist.get_world_size())
    except UserError as error:
        return str(error)
    assert valid is not None
    return [
        batch.tokens
        for step in range(4)
        for source in (train, valid)
        for batch in source.micro_batches(2 * step % 4)
    ]


def damage_and_read(prefix: str) -> str:
    import torch.distributed as dist

    # Changed, not cut: only rank 0 looks at checksums.
    if dist.get_rank() == 0:
        path = Path(prefix + ".bin")
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    dist.barrier()
    try:
        build_batch_sources(run_config([prefix]), dist.get_rank(), dist.get_world_size())
    except UserError as error:
        return str(error)
    return "nothing was wrong"


def test_two_ranks_read_what_one_reads(write_dataset: WriteDataset, tmp_path: Path) -> None:
    prefix = write_dataset("corpus", [[value] * 7 for value in range(1, 41)])
    (alone,) = run_distributed(read_steps, 1, prefix, "80,20,0", str(tmp_path / "one"))
    both = run_distributed(read_steps, 2, prefix, "80,20,0", str(tmp_path / "two"))
    interleaved = [tokens for pair in zip(*both, strict=True) for tokens in pair]
    assert all(torch.equal(a, b) for a, b in zip(alone, interleaved, strict=True))


def test_an_empty_split_does_not_hang_two_ranks(write_dataset: WriteDataset, tmp_path: Path) -> None:
    prefix = write_dataset("three", [[5] * 7] * 3)
    said = run_distributed(read_steps, 2, prefix, "98,1,1", str(tmp_path / "cache"), timeout=60)
    assert all("validation gets none of the 3 documents" in sentence for sentence in said)


def test_a_fault_that_one_rank_sees_stops_all(write_dataset: WriteDataset) -> None:
    prefix = write_dataset("corpus", [[5] * 7] * 6)
    first, second = run_distributed(damage_and_read, 2, prefix, timeout=60)
    assert "SHA-256" in first
    assert second == f"rank 0: {first}"
