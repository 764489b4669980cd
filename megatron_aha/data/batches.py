"""The micro-batches of a step: flat rows of tokens in which documents never attend to each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.datasets.utils import Split
from torch import Tensor

from megatron_aha.config.run import RunConfig
from megatron_aha.data.agree import agree
from megatron_aha.data.checks import SplitPlan, check_model_tokenizer, plan_splits
from megatron_aha.data.datasets import SplitRequest, SplitUse, build_split
from megatron_aha.errors import UserError

logger = logging.getLogger(__name__)


@dataclass
class MicroBatch:
    """``micro_batch_size`` sequences laid end to end in one row.

    Args:
        tokens: int64 ``[tokens]``, inputs; tokens = micro_batch_size * seq_length.
        labels: int64 ``[tokens]``, the token that follows each input.
        loss_mask: fp32 ``[tokens]``, 1 where the token carries loss.
        position_ids: int64 ``[tokens]``, from 0 at each sequence, or at each document.
        cu_seqlens: int32 ``[documents + 1]``, strictly increasing from 0 to tokens: where documents and
            sequences begin and end; attention stays between two neighbours.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor


def cu_seqlens_from_tokens(tokens: Tensor, eod: int, seq_length: int) -> Tensor:
    """Returns the borders of documents and sequences, int32 ``[documents + 1]``, strictly increasing.

    A document is the tokens up to and including its end-of-document token; the last one of a sequence may
    lack it.

    Args:
        tokens: integer ``[tokens]``, whole sequences end to end.
        eod: the end-of-document id.
        seq_length: tokens of a sequence.
    """
    document_ends = torch.nonzero(tokens == eod).flatten() + 1
    sequence_ends = torch.arange(0, tokens.numel() + 1, seq_length, device=tokens.device)
    return torch.unique(torch.cat([document_ends, sequence_ends])).to(torch.int32)


def position_ids_from_borders(borders: Tensor) -> Tensor:
    """Returns positions int64 ``[tokens]`` that restart at 0 at each of the ``borders`` ``[parts + 1]``."""
    borders = borders.long()
    starts = torch.repeat_interleave(borders[:-1], borders.diff())
    return torch.arange(int(borders[-1]), device=borders.device) - starts


class BatchSource:
    """One data-parallel rank's micro-batches, without state: a function of the samples consumed before.

    Args:
        dataset: items hold ``tokens``, ``labels`` and ``loss_mask``, each ``[seq_length]``.
        eod_id: the end-of-document id.
        micro_batch_size: sequences per micro-batch.
        global_batch_size: sequences per step over all data-parallel ranks.
        dp_rank: this data-parallel rank.
        dp_size: data-parallel ranks.
        reset_position_ids: positions restart at each document too, not only at each sequence.
        uses: how much of each dataset the run reads.
        fingerprint: checksums of the data it draws from.

    Raises:
        UserError: the global batch cannot be cut into whole micro-batches.
    """

    def __init__(
        self,
        dataset: Any,
        eod_id: int,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        reset_position_ids: bool,
        uses: Sequence[SplitUse] = (),
        fingerprint: str = "",
    ) -> None:
        per_pass = micro_batch_size * dp_size
        if global_batch_size % per_pass:
            raise UserError(
                f"--training.global_batch_size {global_batch_size} is not a multiple of "
                f"--training.micro_batch_size {micro_batch_size} x {dp_size} data-parallel ranks = "
                f"{per_pass}; the nearest that is: {max(1, round(global_batch_size / per_pass)) * per_pass}"
            )
        self.uses = tuple(uses)
        self.fingerprint = fingerprint
        self._dataset = dataset
        self._eod_id = eod_id
        self._micro_batch_size = micro_batch_size
        self._passes = global_batch_size // per_pass
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._reset_position_ids = reset_position_ids

    def micro_batches(self, consumed_samples: int) -> list[MicroBatch]:
        """Returns this rank's micro-batches of the step that begins after ``consumed_samples`` samples.

        The samples of a step are the same for every layout: pass after pass, rank after rank.
        """
        size = self._micro_batch_size
        firsts = (consumed_samples + (i * self._dp_size + self._dp_rank) * size for i in range(self._passes))
        return [self._micro_batch(range(first, first + size)) for first in firsts]

    def _micro_batch(self, samples: range) -> MicroBatch:
        items = [self._dataset[sample] for sample in samples]
        tokens, labels, loss_mask = (
            torch.cat([item[name] for item in items]) for name in ("tokens", "labels", "loss_mask")
        )
        seq_length = items[0]["tokens"].numel()
        cu_seqlens = cu_seqlens_from_tokens(tokens, self._eod_id, seq_length)
        borders = cu_seqlens if self._reset_position_ids else torch.arange(0, tokens.numel() + 1, seq_length)
        return MicroBatch(tokens, labels, loss_mask, position_ids_from_borders(borders), cu_seqlens)


def build_batch_sources(
    config: RunConfig, dp_rank: int, dp_size: int
) -> tuple[BatchSource, BatchSource | None]:
    """Builds the sources of training and validation batches; collective over all ranks.

    Validation has ``eval_steps`` batches of the global batch size, the same at every evaluation: batch ``i``
    is ``micro_batches(i * global_batch_size)``. What is read of each dataset, and how many epochs of it, is
    logged on rank 0.

    Args:
        config: the run.
        dp_rank: this data-parallel rank.
        dp_size: data-parallel ranks.

    Returns:
        Training and, when ``training.eval_interval`` is not 0, validation.

    Raises:
        UserError: data that is missing, damaged, made for another vocabulary, or too little for a split.
    """
    data, training = config.data, config.training
    # Rank 0 reads the files whole, for their checksums; the others look at sizes.
    is_first = dist.get_rank() == 0
    train_plan, valid_plan = agree(lambda: plan_splits(config, contents=is_first))
    checkpoint = config.checkpoint.init_from
    if checkpoint:
        agree(lambda: check_model_tokenizer(checkpoint, train_plan) if is_first else None)

    def source(plan: SplitPlan, split: Split, steps: int) -> BatchSource:
        request = SplitRequest(
            plan=plan,
            split=split,
            samples=steps * training.global_batch_size,
            seq_length=data.seq_length,
            seed=training.seed,
            eod_mask_loss=data.eod_mask_loss,
        )
        dataset, uses = build_split(request, data.cache_dir)
        for use in uses if is_first else ():
            logger.info("data of %s split: %s", split.name, use)
        return BatchSource(
            dataset,
            plan.data.eod_id,
            micro_batch_size=training.micro_batch_size,
            global_batch_size=training.global_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            reset_position_ids=data.reset_position_ids,
            uses=uses,
            fingerprint=plan.data.fingerprint,
        )

    train = source(train_plan, Split.train, training.train_steps)
    return train, source(valid_plan, Split.valid, training.eval_steps) if valid_plan else None
