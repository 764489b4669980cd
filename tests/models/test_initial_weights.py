"""What a model starts with that is drawn and not read."""

from __future__ import annotations

import pytest
import torch

from megatron_aha.checkpoint.weights import initialise_weights
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.training import TrainingConfig
from megatron_aha.models import build_model
from megatron_aha.parallel.layout import single_process
from megatron_aha.parallel.norm import RMSNorm


@pytest.mark.parametrize(("family", "per_layer"), [("llama", 2), ("qwen3", 4), ("gemma3_text", 6)])
def test_norms_begin_by_changing_nothing_but_the_size(family: str, per_layer: int) -> None:
    with single_process():
        model = build_model(
            ModelConfig(family=family), AHAConfig(), ParallelConfig(), TrainingConfig(precision="fp32")
        )
        initialise_weights(model, 1)
        norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
        assert len(norms) == 2 * per_layer + 1
        for norm in norms:
            states = torch.randn(3, norm.weight.numel())
            found = norm(3 * states)
            expected = states / states.pow(2).mean(-1, keepdim=True).sqrt()
            assert (found - expected).abs().max() < 1e-5
