"""The training loop: steps, evaluations, checkpoints and what is reported about them."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from megatron_aha.checkpoint.reader import CheckpointReader
from megatron_aha.config.run import RunConfig
from megatron_aha.data.batches import MicroBatch, build_batch_sources
from megatron_aha.models.gpt import AHAGPTModel
from megatron_aha.report.console import progress_line
from megatron_aha.report.flops import step_flops
from megatron_aha.report.metrics import MetricsWriter
from megatron_aha.training.checkpointing import restore_training, save_checkpoint
from megatron_aha.training.engine import StepResult, TrainingEngine


@dataclass
class Position:
    """How far a run is.

    Attributes:
        step: optimizer steps done.
        consumed_samples: sequences consumed by them.
    """

    step: int = 0
    consumed_samples: int = 0


class TrainingLoop:
    """Runs a configured model from where its checkpoint stands to ``training.train_steps``.

    Args:
        model: with its weights in place.
        config: of the run.
        source: the checkpoint the weights came from, or None.
        resumed: whether that is the run's own checkpoint, to be continued.
    """

    def __init__(
        self, model: AHAGPTModel, config: RunConfig, source: CheckpointReader | None, resumed: bool
    ) -> None:
        self.config = config
        self.source_dir = None if source is None else source.source_dir
        self.train_data, self.valid_data = build_batch_sources(
            config, parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        )
        self.engine = TrainingEngine(model, config)
        self.position = Position()
        self.saved_step: int | None = None
        if resumed and source is not None:
            step, consumed = restore_training(
                self.engine, source, fresh_optimizer=config.checkpoint.fresh_optimizer
            )
            self.position = Position(step, consumed)
            self.saved_step = step
        self.is_first = torch.distributed.get_rank() == 0
        self.writer: MetricsWriter | None = None
        if self.is_first and config.logging.directory is not None:
            self.writer = MetricsWriter(config.logging.directory, self.position.step)

    def run(self) -> None:
        """Trains to the end, evaluates and saves at the configured intervals and once at the end."""
        training = self.config.training
        self._say(
            f"training steps {self.position.step + 1} to {training.train_steps}"
            if self.position.step < training.train_steps
            else f"nothing to train: {self.position.step} of {training.train_steps} steps are done"
        )
        result: StepResult | None = None
        while self.position.step < training.train_steps:
            result = self._step()
            if self._is_due(self.config.checkpoint.save_interval):
                self._save()
        if result is not None and self.writer is not None and result.router is not None:
            self.writer.usage_heatmap(self.position.step, result.router.usage_per_head.numpy())
        if self.config.checkpoint.directory is not None and self.saved_step != self.position.step:
            self._save()
        if self.writer is not None:
            self.writer.close()

    def _step(self) -> StepResult:
        micro_batches = self.train_data.micro_batches(self.position.consumed_samples)
        started = time.perf_counter()
        result = self.engine.train_step(self.position.step + 1, micro_batches)
        seconds = time.perf_counter() - started
        self.position.step += 1
        self.position.consumed_samples += self.config.training.global_batch_size
        values = self._scalars(result, micro_batches, seconds)
        if self.valid_data is not None and (
            self._is_due(self.config.training.eval_interval)
            or self.position.step == self.config.training.train_steps
        ):
            values |= self._evaluate()
        interval = self.config.logging.log_interval
        if self.position.step % interval == 0 or self.position.step == self.config.training.train_steps:
            self._report(values)
        if (
            self.writer is not None
            and result.router is not None
            and self._is_due(self.config.logging.heatmap_interval)
            and self.position.step < self.config.training.train_steps
        ):
            self.writer.usage_heatmap(self.position.step, result.router.usage_per_head.numpy())
        return result

    def _evaluate(self) -> dict[str, float]:
        assert self.valid_data is not None
        training = self.config.training
        batches = [
            self.valid_data.micro_batches(index * training.global_batch_size)
            for index in range(training.eval_steps)
        ]
        result = self.engine.evaluate(batches)
        values = {"valid/lm_loss": result.lm_loss, "valid/perplexity": math.exp(min(result.lm_loss, 700.0))}
        if result.router is not None:
            values["valid/usage"] = result.router.usage
            values["valid/usage_beyond_window"] = result.router.usage_beyond_window
        return values

    def _scalars(
        self, result: StepResult, micro_batches: list[MicroBatch], seconds: float
    ) -> dict[str, float]:
        router = result.router
        router_loss = 0.0 if router is None else router.router_loss
        values = {
            "train/lm_loss": result.lm_loss,
            "train/router_loss": router_loss,
            "train/total_loss": result.lm_loss + self.config.aha.loss_coefficient * router_loss,
            "train/grad_norm": result.grad_norm,
            "lr/model": result.learning_rates.get("matrices", 0.0),
        }
        if router is not None:
            values["lr/router"] = result.learning_rates["router"]
            values["usage/total"] = router.usage
            values["usage/beyond_window"] = router.usage_beyond_window
            for layer, usage in enumerate(router.usage_per_head.mean(1).tolist()):
                values[f"usage/layer_{layer:02d}"] = usage
        lengths = [length for batch in micro_batches for length in batch.cu_seqlens.diff().tolist()]
        flops = step_flops(
            self.config.model,
            self.config.aha,
            lengths,
            usage_beyond_window=1.0 if router is None else router.usage_beyond_window,
            frozen=self.config.training.freeze_model,
        )
        # This rank's documents stand for those of all data-parallel ranks.
        replicas = parallel_state.get_data_parallel_world_size()
        tokens = self.config.training.global_batch_size * self.config.data.seq_length
        values |= {
            "perf/step_seconds": seconds,
            "perf/tokens_per_s": tokens / seconds,
            "perf/tflops_done": flops.done * replicas / seconds / 1e12,
            "perf/tflops_dense_equivalent": flops.dense_equivalent * replicas / seconds / 1e12,
            "memory/peak_gib": _peak_memory_gib(),
        }
        return values

    def _report(self, values: dict[str, float]) -> None:
        if self.writer is not None:
            self.writer.scalars(self.position.step, values)
        self._say(progress_line(self.position.step, self.config.training.train_steps, values))

    def _save(self) -> None:
        save_checkpoint(
            self.engine, self.config, self.position.step, self.position.consumed_samples, self.source_dir
        )
        self.saved_step = self.position.step
        self._say(f"saved {self.config.checkpoint.directory}, step {self.position.step}")

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.position.step % interval == 0

    def _say(self, line: str) -> None:
        if self.is_first:
            print(line, flush=True)


def _peak_memory_gib() -> float:
    """Returns the largest memory this rank has held: of its GPU, or resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
