"""AdamW over three groups of parameters: matrices, norms, and routers with a rate and decay of their own."""

from __future__ import annotations

import torch

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.training import TrainingConfig
from megatron_aha.models.chunks import StageModel
from megatron_aha.training.schedule import learning_rate


def build_optimizer(model: StageModel, aha: AHAConfig, training: TrainingConfig) -> torch.optim.AdamW:
    """Returns AdamW with the groups ``matrices``, ``norms`` (no weight decay) and ``router``; empty ones are left out.

    With ``training.freeze_model`` only the routers are trained.
    """
    groups: dict[str, list[torch.nn.Parameter]] = {"matrices": [], "norms": [], "router": []}
    for name, parameter in model.named_parameters():
        if ".router." in name:
            groups["router"].append(parameter)
        elif training.freeze_model:
            parameter.requires_grad_(False)
        else:
            groups["norms" if parameter.dim() == 1 else "matrices"].append(parameter)
    decay = {"matrices": training.weight_decay, "norms": 0.0, "router": aha.weight_decay}
    named = [(name, parameters) for name, parameters in groups.items() if parameters]
    if aha.enabled and not groups["router"]:
        # A pipeline stage of windowed layers alone. DeepSpeed's gradient norm is one collective per group, so every
        # stage needs as many groups: the last norm becomes a group of its own, which changes nothing else.
        named.append(("norms", [groups["norms"].pop()]))
    return torch.optim.AdamW(
        [{"params": parameters, "name": name, "weight_decay": decay[name]} for name, parameters in named],
        lr=training.lr,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_eps,
        # One pass over memory instead of a dozen; on CPU and GPU alike.
        fused=True,
    )


def set_learning_rates(
    optimizer: torch.optim.Optimizer, aha: AHAConfig, training: TrainingConfig, step: int
) -> dict[str, float]:
    """Sets each group's rate for a step (from 1) and returns the rates by group name.

    Routers follow the model's schedule, scaled to their own peak. Their rate is returned on every pipeline stage,
    whether it has routers or not.
    """
    rate = learning_rate(training, step)
    router = rate if aha.lr is None else rate * aha.lr / training.lr
    rates = {"matrices": rate, "norms": rate, "router": router}
    for group in optimizer.param_groups:
        group["lr"] = rates[group["name"]]
    return rates
