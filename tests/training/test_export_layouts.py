"""Heads and layers keep their order through every layout: exports of equal weights are equal to the bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from megatron_aha.attention.packed import pack
from megatron_aha.attention.router import AHARouter
from megatron_aha.checkpoint.format import CheckpointReader, CheckpointWriter
from megatron_aha.checkpoint.weights import load_weights
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.config.training import TrainingConfig
from megatron_aha.hf.exporter import export_checkpoint
from megatron_aha.models.build import build_model
from megatron_aha.parallel.layout import build_groups, device
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.testing.tiny import tiny_config, tiny_micro_batches
from megatron_aha.testing.training import start_tiny
from megatron_aha.training.restoring import Position
from megatron_aha.training.saving import CheckpointSaver

# Tensor-parallel size and pipeline stages.
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
LENGTH = 24


def silent(_: str) -> None:
    pass


def config_of(tp: int, pp: int, folder: Path) -> RunConfig:
    parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    config = tiny_config(parallel)
    # a step that moves no weight: sums of different order would differ in their last bit
    config.training.lr = config.training.min_lr = 0.0
    config.checkpoint.directory = str(folder)
    return config


def step_and_save(config: RunConfig) -> None:
    engine = start_tiny(config)
    engine.train_step(1, tiny_micro_batches(config, 1))
    CheckpointSaver(config, None, silent).save(engine, Position(1, config.training.global_batch_size, ""))
    engine.close()


def test_exports_of_a_step_in_every_layout_have_equal_hashes(tmp_path: Path) -> None:
    hashes = []
    for tp, pp in LAYOUTS:
        folder = tmp_path / f"tp{tp}pp{pp}"
        run_distributed(step_and_save, tp * pp, config_of(tp, pp, folder), timeout=200)
        out = export_checkpoint(folder, tmp_path / f"out-{folder.name}", check=False, say=silent)
        hashes.append(hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest())
    assert len(set(hashes)) == 1


def local_logits(folder: str, tp: int) -> list[Tensor]:
    """Returns this rank's router logits of each layer, ``[tokens, local routers]``."""
    parallel = ParallelConfig(tensor_model_parallel_size=tp)
    build_groups(parallel, seed=1)
    reader = CheckpointReader(folder, checksums=False)
    assert reader.aha is not None
    model = build_model(reader.model, reader.aha, parallel, TrainingConfig(precision="fp32"))
    load_weights(model, reader, seed=0, new_router=False)
    seen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, AHARouter):
            module.register_forward_hook(lambda _, inputs, output: seen.append(output.detach()))
    borders = torch.tensor([0, LENGTH], dtype=torch.int32)
    model.logits(
        torch.arange(LENGTH), pack(torch.arange(LENGTH), borders, torch.ones(LENGTH), device=device())
    )
    return seen


def test_each_head_keeps_its_own_router_under_tensor_parallelism(tmp_path: Path) -> None:
    run_distributed(step_and_save, 1, config_of(1, 1, tmp_path / "drawn"), timeout=200)
    reader = CheckpointReader(tmp_path / "drawn")
    constants = torch.tensor([[1.0, -2.0, 3.0, -4.0], [-5.0, 6.0, -7.0, 8.0]])  # [layers, heads]
    tensors = {name: reader.read(name) for name in reader.weight_names()}
    for layer, values in enumerate(constants):
        prefix = f"decoder.layers.{layer}.self_attention.router."
        tensors[f"{prefix}weight"].zero_()
        tensors[f"{prefix}bias"] = values.clone()
    with CheckpointWriter(tmp_path / "constant", 1, reader.model, reader.aha) as writer:
        step = writer.finish([writer.write_file("a.safetensors", tensors)])
    for tp in (1, 2, 4):
        ranks = run_distributed(local_logits, tp, str(step), tp, timeout=200)
        for layer, values in enumerate(constants):
            logits = torch.cat([rank[layer].flatten(0, -2) for rank in ranks], dim=-1)
            assert torch.equal(logits, values.expand(LENGTH, 4)), tp
