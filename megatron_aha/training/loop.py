"""The training loop: steps, evaluations, checkpoints and what is reported about them."""

from __future__ import annotations

import logging
import math
import time

import torch
from megatron.core import parallel_state

from megatron_aha.checkpoint.reader import CheckpointReader, complete_steps
from megatron_aha.checkpoint.weights import load_weights
from megatron_aha.config.run import RunConfig
from megatron_aha.data.batches import build_batch_sources
from megatron_aha.errors import UserError
from megatron_aha.models import build_stage
from megatron_aha.models.chunks import StageModel
from megatron_aha.report.console import progress_line
from megatron_aha.report.metrics import MetricsWriter
from megatron_aha.training.engine import StepResult, TrainingEngine
from megatron_aha.training.restoring import Position, restore_training
from megatron_aha.training.saving import CheckpointSaver
from megatron_aha.training.scalars import step_scalars
from megatron_aha.training.stop import StopRequests

logger = logging.getLogger(__name__)


class TrainingLoop:
    """Runs a configured model from where its checkpoint stands to ``training.train_steps``.

    Args:
        model: with its weights in place.
        config: of the run.
        source: the checkpoint the weights came from, or None.
        resumed: whether that is the run's own checkpoint, to be continued.
    """

    def __init__(
        self, model: StageModel, config: RunConfig, source: CheckpointReader | None, resumed: bool
    ) -> None:
        self.config = config
        self.is_first = torch.distributed.get_rank() == 0
        self.saver: CheckpointSaver | None = None
        if config.checkpoint.directory is not None:
            source_dir = None if source is None else source.source_dir
            self.saver = CheckpointSaver(config, source_dir, self._say)
        self.train_data, self.valid_data = build_batch_sources(
            config, parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        )
        self.engine = TrainingEngine(model, config)
        self.position = Position(step=0, consumed_samples=0, data=self.train_data.fingerprint)
        self.saved_step: int | None = None
        self.usage: torch.Tensor | None = None
        self.bad_steps = 0
        if resumed and source is not None:
            self._resume(source)
        self.writer: MetricsWriter | None = None
        if self.is_first and config.logging.directory is not None:
            self.writer = MetricsWriter(config.logging.directory, self.position.step)

    def run(self) -> None:
        """Trains to the end, evaluates and saves at the configured intervals and once at the end."""
        done, last = self.position.step, self.config.training.train_steps
        self._say(
            f"training steps {done + 1} to {last}"
            if done < last
            else f"nothing to train: {done} of {last} steps are done"
        )
        with StopRequests() as stop:
            while self.position.step < last:
                self._step()
                if self.saver is not None:
                    self.saver.poll()
                reason = stop.agreed()
                if reason is not None or self._is_due(self.config.checkpoint.save_interval):
                    self._save()
                if reason is not None:
                    kept = "" if self.saved_step else "; nothing saved, --checkpoint.directory is not set"
                    self._say(f"stopped after step {self.position.step}: {reason}{kept}")
                    break
            if self.saver is not None:
                self.saver.wait()
        if self.writer is not None:
            self.writer.close()

    def _resume(self, source: CheckpointReader) -> None:
        restored = restore_training(
            self.engine, source, fresh_optimizer=self.config.checkpoint.fresh_optimizer
        )
        if restored.data != self.position.data and self.is_first:
            logger.warning(
                "--data.blend is not the data of %s: going on at sample %d of the new data",
                source.folder,
                restored.consumed_samples,
            )
        self.position.step, self.position.consumed_samples = restored.step, restored.consumed_samples
        self.saved_step = restored.step

    def _step(self) -> None:
        micro_batches = self.train_data.micro_batches(self.position.consumed_samples)
        started = time.perf_counter()
        result = self.engine.train_step(self.position.step + 1, micro_batches)
        seconds = time.perf_counter() - started
        self.position.step += 1
        self.position.consumed_samples += self.config.training.global_batch_size
        values = step_scalars(self.config, result, micro_batches, seconds)
        if self.valid_data is not None and self._is_due(self.config.training.eval_interval):
            values |= self._evaluate()
        if result.fault is not None or self._is_due(self.config.logging.log_interval):
            self._report(values)
        if result.fault is None and self._is_due(self.config.logging.heatmap_interval):
            self._draw(result)
        if result.overflowed:
            scale = self.engine.loss_scale.value
            self._say(
                f"step {self.position.step} was not applied: a gradient overflowed at loss scale "
                f"{result.loss_scale:g}, the next step has {scale:g}"
            )
        if result.fault is None and result.router is not None:
            self.usage = result.router.usage_per_head
        self._follow(result.fault)

    def _follow(self, fault: str | None) -> None:
        """Does what ``training.bad_step`` says about a step whose update was dropped."""
        if fault is None:
            self.bad_steps = 0
            return
        training, step = self.config.training, self.position.step
        self.bad_steps += 1
        told = f"step {step} was not applied: {fault}"
        if training.bad_step == "stop" or self.bad_steps >= training.bad_step_limit:
            raise UserError(f"{told}; {self._advice()}")
        if training.bad_step == "rollback":
            self._roll_back(told)
        elif self.is_first:
            logger.warning("%s (%d in a row)", told, self.bad_steps)

    def _advice(self) -> str:
        training = self.config.training
        if training.bad_step == "stop":
            return (
                "the last checkpoint is untouched: lower --training.lr, or go on past such steps with "
                "--training.bad_step skip or rollback"
            )
        return f"--training.bad_step_limit {training.bad_step_limit} bad steps in a row: lower --training.lr"

    def _roll_back(self, told: str) -> None:
        """Takes weights and optimizer from the run's last checkpoint; step, schedule and data go on."""
        directory = self.config.checkpoint.directory
        assert directory is not None and self.saver is not None
        self.saver.wait()
        if not complete_steps(directory):
            raise UserError(
                f"{told}; --checkpoint.directory {directory} holds no checkpoint to go back to yet"
            )
        reader = CheckpointReader(directory, checksums=self.is_first)
        if self.is_first:
            logger.warning("%s; weights and optimizer go back to %s", told, reader.folder)
        self.engine.close()
        model = build_stage(self.config.model, self.config.aha, self.config.parallel, self.config.training)
        load_weights(model, reader, seed=self.config.training.seed, new_router=False)
        self.engine = TrainingEngine(model, self.config)
        restore_training(self.engine, reader, fresh_optimizer=False)

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

    def _report(self, values: dict[str, float]) -> None:
        if self.writer is not None:
            self.writer.scalars(self.position.step, values)
        self._say(progress_line(self.position.step, self.config.training.train_steps, values))

    def _draw(self, result: StepResult) -> None:
        if self.writer is not None and result.router is not None:
            self.writer.usage_heatmap(self.position.step, result.router.usage_per_head.numpy())

    def _save(self) -> None:
        if self.saver is None or self.saved_step == self.position.step:
            return
        self.saver.save(self.engine, self.position, self.usage)
        self.saved_step = self.position.step

    def _is_due(self, interval: int) -> bool:
        """Returns whether something of this interval happens now; the last step is always due."""
        step = self.position.step
        return step == self.config.training.train_steps or (interval > 0 and step % interval == 0)

    def _say(self, line: str) -> None:
        if self.is_first:
            print(line, flush=True)
