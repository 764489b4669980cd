"""The random states of a rank as tensors: dropout continues after a resume where it was."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor


def random_states() -> dict[str, Tensor]:
    """Returns this rank's generator states by name, uint8."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        states[f"tracker.{name}"] = state
    return states


def restore_random_states(states: dict[str, Tensor]) -> None:
    """Sets this rank's generators to saved states."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    prefix = "tracker."
    trackers = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    get_cuda_rng_tracker().set_states(trackers)
