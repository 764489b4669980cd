"""What families add trains alike in every layout, and what was trained is what is exported."""

from __future__ import annotations

from pathlib import Path

import pytest
from compare import largest_relative_error

from megatron_aha.config.model import ModelConfig, RopeScaling
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.run import RunConfig
from megatron_aha.testing.distributed import run_distributed
from megatron_aha.testing.tiny import tiny_config
from megatron_aha.testing.training import TinyRun, start_tiny, train_tiny

MODELS = {
    "qwen2": ModelConfig(family="qwen2", init_std=0.1),
    "qwen3": ModelConfig(family="qwen3", init_std=0.1, tied_embeddings=False),
    # A window on the first stage of a pipeline only, which then has no router, and other frequencies there.
    "olmo3": ModelConfig(
        family="olmo3",
        init_std=0.1,
        static_window=5,
        windowed_layers=[0],
        rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=16),
    ),
    # One key/value head for all ranks, and what no other family has: norms about 1, scaled embeddings, two bases.
    "gemma3_text": ModelConfig(
        family="gemma3_text",
        init_std=0.1,
        num_query_groups=1,
        static_window=5,
        windowed_layers=[0],
        rope_theta=1e6,
        windowed_rope_theta=1e4,
        rope_scaling=RopeScaling("linear", 8.0),
        query_pre_attn_scalar=40,
    ),
}
# Tensor-parallel size, sequence parallelism, pipeline stages, ZeRO stage; TP 4 holds copies of the two KV groups.
LAYOUTS = [(4, True, 1, 0), (2, False, 2, 1), (2, True, 1, 3)]


def config_of(name: str, tp: int = 1, sp: bool = False, pp: int = 1, zero: int = 0) -> RunConfig:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, sequence_parallel=sp
    )
    config = tiny_config(parallel, zero_stage=zero)
    config.model = MODELS[name]
    return config


def train_all(configs: list[RunConfig]) -> list[TinyRun]:
    # Adam's first update takes the sign of each gradient, also of those that rounding decides: behind norms that do
    # not see the size of a weight the second step's gradients differ by 1e-5, its loss and norm much less.
    return [train_tiny(config, 2, gradients_at=1) for config in configs]


@pytest.mark.slow  # nine layouts of four ranks
def test_losses_and_gradients_are_those_of_one_process() -> None:
    wanted = run_distributed(train_all, 1, [config_of(name) for name in MODELS], timeout=200)[0]
    configs = [config_of(name, *layout) for layout in LAYOUTS for name in MODELS]
    found = run_distributed(train_all, 4, configs, timeout=280)[0]
    for config, run, expected in zip(configs, found, wanted * len(LAYOUTS), strict=True):
        where = (config.model.family, config.parallel, config.training.zero_stage)
        for mine, theirs in zip(run.steps, expected.steps, strict=True):
            assert mine.lm_loss == pytest.approx(theirs.lm_loss, rel=1e-5), where
            assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5), where
            assert mine.router is not None and theirs.router is not None
            assert mine.router.router_loss == pytest.approx(theirs.router.router_loss, rel=1e-5), where
        error, worst = largest_relative_error(run.gradients, expected.gradients)
        assert error < 1e-5, (worst, where)


def train_and_save(config: RunConfig) -> None:
    from megatron_aha.testing.tiny import tiny_micro_batches
    from megatron_aha.training.restoring import Position
    from megatron_aha.training.saving import CheckpointSaver

    engine = start_tiny(config)
    engine.train_step(1, tiny_micro_batches(config, 1))
    saver = CheckpointSaver(config, None, print)
    saver.save(engine, Position(1, config.training.global_batch_size, ""))
    saver.wait()


@pytest.mark.parametrize("name", MODELS)
def test_what_was_trained_is_what_is_exported(tmp_path: Path, name: str) -> None:
    """Trained on two pipeline stages; the export's own check compares logits and routes in a fresh process."""
    from megatron_aha.hf.exporter import export_checkpoint

    config = config_of(name, pp=2)
    config.checkpoint.directory = str(tmp_path / "run")
    run_distributed(train_and_save, 2, config, timeout=200)
    said: list[str] = []
    export_checkpoint(tmp_path / "run", tmp_path / "hf", say=said.append)
    assert any("at most 1e-05" in line for line in said)
    assert (tmp_path / "hf" / f"modeling_{MODELS[name].family}_aha.py").exists()
