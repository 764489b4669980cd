"""Checks that all ranks pass, or all ranks fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_aha.errors import UserError

Result = TypeVar("Result")


def agree(check: Callable[[], Result]) -> Result:
    """Runs a check on every rank and lets all of them fail when one does.

    A rank that raised alone would leave the others waiting in the next collective for ever.

    Returns:
        What the check returned on this rank.

    Raises:
        UserError: this rank's complaint, or that of the first rank that has one.
    """
    results: list[Result] = []
    complaint = None
    try:
        results.append(check())
    except UserError as error:
        complaint = str(error)
    complaints: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(complaints, complaint)
    if complaint is not None:
        raise UserError(complaint)
    for rank, text in enumerate(complaints):
        if text is not None:
            raise UserError(f"rank {rank}: {text}")
    return results[0]
