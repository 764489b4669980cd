"""An exported model under transformers' own Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_models import make_aha, random_tokens
from torch import Tensor


def train(folder: Path, batch: int, accumulation: int, checkpointing: bool) -> tuple[list[float], Tensor]:
    """Returns the loss of three steps of four sequences, and a router's weight afterwards."""
    from transformers import Trainer, TrainingArguments

    model = make_aha(aha_loss_coefficient=0.5).train()
    rows = random_tokens(12, 24)
    rows[1::3, :10] = -100  # sequences carry loss on different numbers of tokens
    data = [{"input_ids": row.clamp(min=0), "labels": row, "attention_mask": torch.ones(24)} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=checkpointing,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, model.model.layers[0].self_attn.router.weight.detach()


def test_losses_do_not_depend_on_how_a_batch_is_accumulated(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    whole, weight = train(tmp_path, 4, 1, checkpointing=False)
    assert len(whole) == 3
    for batch, accumulation in ((1, 4), (2, 2)):
        losses, moved = train(tmp_path, batch, accumulation, checkpointing=batch == 1)
        assert losses == pytest.approx(whole, rel=1e-5)
        assert torch.allclose(moved, weight, atol=1e-5)
    start = make_aha().model.layers[0].self_attn.router.weight
    assert (weight - start).abs().max() > 1e-3
