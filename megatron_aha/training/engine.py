"""One optimizer step, one evaluation: our model on a DeepSpeed engine, with or without pipeline stages."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_aha.attention.packed import PackedBatch, pack
from megatron_aha.attention.router import router_count
from megatron_aha.attention.tracker import RouterStatistics, UsageTracker
from megatron_aha.checkpoint.sharding import local_parameters
from megatron_aha.config.run import RunConfig
from megatron_aha.data.batches import MicroBatch
from megatron_aha.errors import UserError
from megatron_aha.models.chunks import StageModel, chunks_of
from megatron_aha.models.gpt import AHAGPTModel
from megatron_aha.parallel.context import context_share
from megatron_aha.parallel.layout import backend, device
from megatron_aha.parallel.mpu import ModelParallelUnit
from megatron_aha.training.deepspeed_config import deepspeed_config
from megatron_aha.training.guard import UpdateGuard
from megatron_aha.training.loss_scale import LossScale
from megatron_aha.training.optimizer import build_optimizer, set_learning_rates
from megatron_aha.training.optimizer_state import OptimizerState


@dataclass
class StepResult:
    """What one step did, equal on all ranks.

    Attributes:
        lm_loss: mean cross-entropy over the tokens that carry loss.
        tokens: how many tokens carried loss.
        router: what the routers did; None for a dense model.
        grad_norm: global gradient norm before clipping; 0 for an evaluation.
        fault: why the update was dropped, or None when it was applied.
        loss_scale: by which the loss was multiplied; above 1 in fp16 only.
        overflowed: whether the update was dropped because an fp16 gradient overflowed at this scale.
        learning_rates: by parameter group, whether this stage has such parameters or not.
    """

    lm_loss: float
    tokens: float
    router: RouterStatistics | None
    grad_norm: float
    learning_rates: dict[str, float]
    fault: str | None = None
    loss_scale: float = 1.0
    overflowed: bool = False


def init_distributed() -> None:
    """Joins the processes that the launcher started.

    Raises:
        UserError: deepspeed is not installed.
    """
    deepspeed = _deepspeed()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        # Its shared-memory all-reduce would be compiled at start-up, and serves inference only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend(), verbose=False)


class TrainingEngine:
    """The model, its optimizer and DeepSpeed's engine on this rank.

    Losses are normalised by the tokens of the whole step before any averaging: both the LM loss and the router loss
    are sums over this rank's tokens divided by the global count, times the number of replicas over which DeepSpeed
    averages. Neither depends on how the batch is cut. Context-parallel ranks are replicas that see other tokens.

    Args:
        model: with its weights in place.
        config: of the run.
    """

    def __init__(self, model: StageModel, config: RunConfig) -> None:
        self.config = config
        self.model = model
        self.data_parallel_size = parallel_state.get_data_parallel_world_size()
        self.replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        self.tracker = self._build_tracker()
        _mark_tied_copy(model)
        _check_precision(config.training.precision)
        self.deepspeed, _, _, _ = _deepspeed().initialize(
            model=model,
            optimizer=build_optimizer(model, config.aha, config.training),
            mpu=ModelParallelUnit(),
            config=deepspeed_config(config.training, self.data_parallel_size, self.replicas),
            dist_init_required=False,
        )
        self.loss_scale = LossScale(self.deepspeed, config.training.precision)
        for chunk in chunks_of(model):  # Megatron-core's schedules call backward themselves
            chunk.config.grad_scale_func = self._scaled if config.training.precision == "fp16" else None
        self.optimizer_state = OptimizerState(self.deepspeed, config.training.zero_stage)
        self.guard = UpdateGuard(
            self.optimizer_state.adam,
            lambda: float(self.deepspeed.optimizer._global_grad_norm),
            config.training,
        )

    def train_step(self, step: int, micro_batches: list[MicroBatch]) -> StepResult:
        """Runs one optimizer step (a collective).

        Args:
            step: number of the step, from 1; it sets the learning rate.
            micro_batches: this data-parallel rank's part of the global batch.
        """
        self.deepspeed.train()
        rates = set_learning_rates(self.deepspeed.optimizer, self.config.aha, self.config.training, step)
        tokens = self._count_tokens(micro_batches)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device())
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            for index, micro_batch in enumerate(micro_batches):
                loss = self._loss(micro_batch, tokens, loss_sum, seed=self._router_seed(step, index))
                # The engine must not divide by the accumulation steps: the loss is already normalised.
                self.deepspeed.backward(loss, scale_wrt_gas=False)
                if index + 1 < len(micro_batches):
                    self.deepspeed.step()  # only counts the micro-batch
        else:
            self._pipeline_backward(step, micro_batches, tokens, loss_sum)
        lm_loss, scale = self._mean_loss(loss_sum, tokens), self.loss_scale.value
        norm, fault = self._update(lm_loss)
        router = self._router_statistics()
        overflowed = fault is None and self.loss_scale.overflowed
        return StepResult(
            lm_loss, tokens, router, norm, rates, fault=fault, loss_scale=scale, overflowed=overflowed
        )

    def _update(self, lm_loss: float) -> tuple[float, str | None]:
        """Steps the optimizer and returns the gradient norm and why the update was dropped, if it was."""
        norm = self._clip_unsharded_gradients()
        self.guard.expect(lm_loss, norm)
        self.deepspeed.step()
        self.loss_scale.end_step()
        if norm is None:
            norm = float(self.deepspeed.get_global_grad_norm())
        if self.loss_scale.overflowed and math.isfinite(lm_loss):
            return norm, None  # how a dynamic scale finds its size, not a bad step
        return norm, self.guard.outcome(norm)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss * self.loss_scale.value

    def close(self) -> None:
        """Lets go of DeepSpeed's buffers and hooks; the engine is of no use afterwards."""
        self.deepspeed.destroy()

    def evaluate(self, batches: list[list[MicroBatch]]) -> StepResult:
        """Returns loss and routes over several batches without training (a collective)."""
        self.deepspeed.eval()
        micro_batches = [micro_batch for batch in batches for micro_batch in batch]
        tokens = self._count_tokens(micro_batches)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device())
        with torch.no_grad():
            if parallel_state.get_pipeline_model_parallel_world_size() == 1:
                for micro_batch in micro_batches:
                    self._loss(micro_batch, tokens, loss_sum)
            else:
                self._run_schedule(micro_batches, tokens, loss_sum, step=None)
        return StepResult(self._mean_loss(loss_sum, tokens), tokens, self._router_statistics(), 0.0, {})

    def _router_seed(self, step: int, index: int) -> int:
        """Returns the seed of a micro-batch's first token: its number among the tokens of the run.

        It is the same however the batch is cut, since samples go to the ranks as ``BatchSource`` deals them out.
        """
        training = self.config.training
        number = index * self.data_parallel_size + parallel_state.get_data_parallel_rank()
        sample = step * training.global_batch_size + number * training.micro_batch_size
        # 31 bits of the run's seed above 32 of the token's number: what a signed 64-bit number holds
        return training.seed % 2**31 * 2**32 + sample * self.config.data.seq_length

    def _pack(self, micro_batch: MicroBatch, tokens: float, seed: int) -> PackedBatch:
        weight = 0.0
        if self.tracker is not None:
            routers = len(self.config.model.routed_layers) * self.tracker.sums.size(1)
            weight = self.config.aha.loss_coefficient * self.replicas / (tokens * routers)
            weight *= self.loss_scale.value  # as the loss itself is before its backward pass
        return pack(
            micro_batch.position_ids,
            micro_batch.cu_seqlens,
            micro_batch.loss_mask,
            device=device(),
            share=context_share(micro_batch.tokens.numel(), self.config.data.seq_length),
            router_loss_weight=weight,
            router_seed=seed,
            tracker=self.tracker,
        )

    def _loss(self, micro_batch: MicroBatch, tokens: float, loss_sum: Tensor, seed: int = 0) -> Tensor:
        """Returns one micro-batch's share of the step's loss, times the number of replicas."""
        packed = self._pack(micro_batch, tokens, seed)
        output = self.deepspeed(*_inputs(micro_batch, packed))
        return self._weigh(packed.loss_mask, tokens, loss_sum, output)[0]

    def _weigh(
        self, loss_mask: Tensor, tokens: float, loss_sum: Tensor, token_losses: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns the weighed loss in the form Megatron-core's schedules expect, and adds to ``loss_sum``."""
        total = (token_losses.float() * loss_mask).sum()
        loss_sum += total.detach().double()
        return total * (self.replicas / tokens), loss_mask.sum().int(), {}

    def _run_schedule(
        self, micro_batches: list[MicroBatch], tokens: float, loss_sum: Tensor, step: int | None
    ) -> None:
        """Runs Megatron-core's pipeline schedule over the micro-batches, forward only when no step is given."""

        def forward_step(
            batches: Iterator[tuple[int, MicroBatch]], module: AHAGPTModel
        ) -> tuple[Tensor, Any]:
            index, micro_batch = next(batches)
            packed = self._pack(micro_batch, tokens, 0 if step is None else self._router_seed(step, index))
            output = module(*_inputs(micro_batch, packed))
            return output, partial(self._weigh, packed.loss_mask, tokens, loss_sum)

        chunks = chunks_of(self.model)
        # Every chunk of an interleaved stage meets every micro-batch.
        batches = [enumerate(micro_batches) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches if len(chunks) > 1 else batches[0],
            model=chunks,
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].tokens.numel(),
            micro_batch_size=1,
            forward_only=step is None,
        )

    def _pipeline_backward(
        self, step: int, micro_batches: list[MicroBatch], tokens: float, loss_sum: Tensor
    ) -> None:
        """Runs the schedule; Megatron-core owns the backward passes, DeepSpeed the reduction of the gradients."""
        self.deepspeed.pipeline_parallelism = True
        self.deepspeed.set_gradient_accumulation_boundary(False)
        self._run_schedule(micro_batches, tokens, loss_sum, step)
        self.deepspeed.set_gradient_accumulation_boundary(True)
        self._sum_tied_gradients()
        self.deepspeed.allreduce_gradients()

    def _sum_tied_gradients(self) -> None:
        """Adds the gradients of the first and last stage's copies of a tied embedding."""
        is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        if self.model.model_config.tied_embeddings and (is_first or is_last):
            chunks = chunks_of(self.model)
            weight = (chunks[0] if is_first else chunks[-1]).shared_embedding_or_output_weight()
            if weight.grad is not None:
                torch.distributed.all_reduce(weight.grad, group=parallel_state.get_embedding_group())

    def _clip_unsharded_gradients(self) -> float | None:
        """Clips under ZeRO-0 and returns the global gradient norm before it; elsewhere DeepSpeed does, and None.

        DeepSpeed's ZeRO-0 reports no norm, and its clipping counts both pipeline copies of a tied embedding.
        """
        if self.config.training.zero_stage > 0:
            return None
        squares = torch.zeros((), dtype=torch.float64, device=device())
        gradients = []
        for local in local_parameters(self.model):
            if local.parameter.grad is None:
                continue
            gradients.append(local.parameter.grad)
            counted = local.owned and (
                not local.replicated or parallel_state.get_tensor_model_parallel_rank() == 0
            )
            if counted:
                squares += torch.linalg.vector_norm(local.parameter.grad, dtype=torch.float64).square()
        torch.distributed.all_reduce(squares, group=parallel_state.get_model_parallel_group())
        norm = float(squares.sqrt())
        largest = self.config.training.clip_grad
        if 0 < largest < norm:
            torch._foreach_mul_(gradients, largest / (norm + 1e-6))
        return norm

    def _build_tracker(self) -> UsageTracker | None:
        aha, model = self.config.aha, self.config.model
        if not aha.enabled:
            return None
        routers = router_count(aha, model.num_attention_heads, model.num_query_groups)
        return UsageTracker(model.num_layers, routers, device())

    def _router_statistics(self) -> RouterStatistics | None:
        return None if self.tracker is None else self.tracker.reduce()

    def _count_tokens(self, micro_batches: list[MicroBatch]) -> float:
        """Returns the tokens that carry loss over all data-parallel ranks, at least 1."""
        count = torch.zeros((), dtype=torch.float64, device=device())
        for micro_batch in micro_batches:
            count += float(micro_batch.loss_mask.double().sum())
        torch.distributed.all_reduce(count, group=parallel_state.get_data_parallel_group())
        return max(float(count), 1.0)

    def _mean_loss(self, loss_sum: Tensor, tokens: float) -> float:
        """Returns the mean loss on all ranks; tensor-parallel ranks hold copies, earlier stages hold zero."""
        torch.distributed.all_reduce(loss_sum)
        return float(loss_sum) / parallel_state.get_tensor_model_parallel_world_size() / tokens


def _inputs(micro_batch: MicroBatch, packed: PackedBatch) -> tuple[Tensor, PackedBatch, Tensor]:
    """Returns what the model is called with: this rank's tokens and labels on its device."""
    tokens, labels = micro_batch.tokens, micro_batch.labels
    if packed.share is not None:
        tokens, labels = packed.share.take(tokens), packed.share.take(labels)
    return tokens.to(device()), packed, labels.to(device())


def _mark_tied_copy(model: StageModel) -> None:
    """Tells DeepSpeed's gradient norm that the last stage's copy of a tied embedding is counted elsewhere."""
    for local in local_parameters(model):
        if not local.owned:
            local.parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


def _check_precision(precision: str) -> None:
    """Raises UserError when this device cannot train in fp16."""
    from deepspeed.accelerator import get_accelerator

    if precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise UserError(f"--training.precision fp16 cannot run on this {device().type}; use bf16 or fp32")


def _deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            "deepspeed is not installed; install it with: pip install 'deepspeed>=0.19,<0.20'"
        ) from error
    return deepspeed
