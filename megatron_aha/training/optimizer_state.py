"""Adam's moments and fp32 master weights of one parameter, whole, under any ZeRO stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerState:
    """Reads and writes a parameter's optimizer state as full tensors of the parameter's local shape.

    The moments exist from the start, at zero, as torch's AdamW would create them at its first step: DeepSpeed's
    ZeRO-1 and 2 link parameters to moments once, after the first group's first step, when those of the other
    groups do not exist yet, and would then never find them.

    Args:
        engine: the DeepSpeed engine.
        zero_stage: ZeRO stage 0 to 3.
    """

    def __init__(self, engine: Any, zero_stage: int) -> None:
        self.zero_stage = zero_stage
        self.optimizer = engine.optimizer
        # Under ZeRO >= 1 DeepSpeed's optimizer wraps torch's, whose parameters are flat fp32 partitions.
        self.adam: torch.optim.Optimizer = engine.optimizer.optimizer if zero_stage else engine.optimizer

        for parameter in self._adam_parameters():
            self.adam.state[parameter] = {
                # The fused AdamW counts its steps beside the parameter.
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{
                    moment: torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    for moment in MOMENTS
                },
            }
        if zero_stage in (1, 2):
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def steps(self) -> int:
        """Returns how many steps Adam has done, which its bias correction depends on."""
        return int(self.adam.state[self._adam_parameters()[0]]["step"])

    def set_steps(self, steps: int) -> None:
        """Sets how many steps Adam has done."""
        for parameter in self._adam_parameters():
            self.adam.state[parameter]["step"].fill_(steps)

    def master(self, parameter: nn.Parameter) -> Tensor:
        """Returns the fp32 weight (a collective over the data-parallel group)."""
        from deepspeed.utils import safe_get_full_fp32_param

        if self.zero_stage == 0:
            return parameter.detach()
        return safe_get_full_fp32_param(parameter)

    def set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Sets the fp32 weight; the model's own copy follows at the next step."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if self.zero_stage == 3:
            safe_set_local_fp32_param(parameter, self._partition(parameter, value))
        else:
            safe_set_full_fp32_param(parameter, value)

    def moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Returns a moment, fp32 (a collective over the data-parallel group)."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if self.zero_stage == 0:
            return self.adam.state[parameter][key]
        return safe_get_full_optimizer_state(parameter, key)

    def set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Sets a moment."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self.zero_stage == 0:
            self.adam.state[parameter][key].copy_(value)
        elif self.zero_stage == 3:
            safe_set_local_optimizer_state(parameter, self._partition(parameter, value), key)
        else:
            safe_set_full_optimizer_state(parameter, value, key)

    def _adam_parameters(self) -> list[Tensor]:
        if self.zero_stage == 3:
            # Between steps ZeRO-3 keeps torch's parameter groups empty.
            return list(self.optimizer.fp32_partitioned_groups_flat)
        return [parameter for group in self.adam.param_groups for parameter in group["params"]]

    def _partition(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """Returns this rank's part of a full value, zero-padded where the parts are uneven."""
        from deepspeed.utils import safe_get_local_fp32_param

        size = safe_get_local_fp32_param(parameter).numel()
        group = parameter.ds_process_group  # type: ignore[attr-defined]
        start = size * torch.distributed.get_rank(group)
        mine = value.flatten()[start : start + size]
        return nn.functional.pad(mine, (0, size - mine.numel()))
