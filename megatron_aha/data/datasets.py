"""Megatron-core datasets of one split: checked beforehand, cached under the checksums of the data."""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from megatron_aha.data.agree import agree
from megatron_aha.data.blend import dataset_name
from megatron_aha.data.checks import SplitPlan
from megatron_aha.errors import UserError

# Megatron-core's own default: room for a blend that draws a little more from one dataset than its share.
_SURPLUS = 0.005


@dataclass(frozen=True)
class SplitUse:
    """How much of one dataset's split a run reads.

    Args:
        name: the dataset.
        documents: documents of the split.
        tokens: tokens of the split in one epoch.
        samples: samples the run asks for.
        epochs: passes over the split that these samples need, counted in full.
        share: the samples' tokens over the tokens of the split.
    """

    name: str
    documents: int
    tokens: int
    samples: int
    epochs: int
    share: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.samples} samples from {self.documents} documents, {self.tokens} tokens "
            f"= {self.share:.2f} of them, epochs used: {self.epochs}"
        )


@dataclass(frozen=True)
class SplitRequest:
    """What to build.

    Args:
        plan: the datasets and their documents.
        split: under which of Megatron-core's names.
        samples: samples the run will read. While they fit in one epoch, their order does not depend on their
            number; beyond that Megatron-core shuffles all epochs together, and a longer run has another
            order.
        seq_length: tokens of a sample.
        seed: of the order of documents and samples.
        eod_mask_loss: end-of-document tokens carry no loss as inputs.
    """

    plan: SplitPlan
    split: Split
    samples: int
    seq_length: int
    seed: int
    eod_mask_loss: bool


class _Vocabulary:
    """What Megatron-core's datasets ask of a tokenizer.

    It has no ``pad``: Megatron-core then pads with -1, an id that no text has, so an end-of-document id that
    the tokenizer also uses for padding keeps its loss.
    """

    def __init__(self, vocab_size: int, eod: int, fingerprint: str) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        # Part of the key of every index cache: another text under the same name gets another key.
        self.unique_identifiers = OrderedDict(vocab_size=vocab_size, eod=eod, data=fingerprint)


def build_split(request: SplitRequest, cache_dir: str | None) -> tuple[Any, list[SplitUse]]:
    """Builds one split; collective, so every rank must call it, with ``torch.distributed`` initialised.

    Args:
        request: what to build.
        cache_dir: where indices are cached; None takes ``index_cache`` beside the first dataset.

    Returns:
        The dataset (items hold ``tokens``, ``labels``, ``loss_mask``, each ``[seq_length]``) and its use,
        one entry per prefix.

    Raises:
        UserError: the cache directory cannot be written.
    """
    data, bounds = request.plan.data, request.plan.bounds
    lengths = _split_lengths(request.plan)
    prefixes = list(data.blend.prefixes)
    weights = data.blend.weights or tuple(float(length.sum()) for length in lengths)
    config = GPTDatasetConfig(
        random_seed=request.seed,
        sequence_length=request.seq_length,
        blend=(prefixes, list(weights) if len(prefixes) > 1 else None),
        split="1,0,0",
        path_to_cache=None,
        tokenizer=_Vocabulary(data.sidecars[0].tokenizer.vocab_size, data.eod_id, data.fingerprint),
        mid_level_dataset_surplus=_surplus(weights, request.samples),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=request.eod_mask_loss,
        create_attention_mask=False,
    )
    # Only this split is built: an empty one would make Megatron-core count epochs for ever.
    config.split = f"{bounds[0]}..{bounds[1]}"
    config.split_matrix = [bounds if split is request.split else None for split in Split]
    sizes = [request.samples if split is request.split else 0 for split in Split]

    final = _cache_directory(request, weights, cache_dir)
    building = _shared_name(final)
    config.path_to_cache = str(building)
    try:
        datasets = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    except Exception as error:
        # Megatron-core turns a full disk into a bare Exception that hides what the system said.
        if isinstance(error.__cause__, OSError):
            raise UserError(f"--data.cache_dir: cannot write '{building}' ({error.__cause__})") from error
        raise
    dist.barrier()
    if building != final and dist.get_rank() == 0 and not final.exists():
        os.rename(building, final)
    dataset = datasets[request.split.value]
    return dataset, _use(request, dataset, lengths)


def _split_lengths(plan: SplitPlan) -> list[np.ndarray]:
    """Tokens of each document of the split, per dataset."""
    lengths = []
    for prefix, (begin, end) in zip(plan.data.blend.prefixes, plan.documents, strict=True):
        # Kept alive until copied: it closes the memory map under its views when it goes.
        dataset = IndexedDataset(prefix)
        lengths.append(dataset.sequence_lengths[begin:end].copy())
        del dataset
    return lengths


def _surplus(weights: Sequence[float], samples: int) -> float:
    """Spare samples of each dataset, as a share, so that a blend of many small parts never runs over.

    Megatron-core rounds every dataset's part up, sums the parts, and blends that sum by weight: with few
    samples and many datasets the heavy ones are then asked for more than their own part.
    """
    shares = [weight / sum(weights) for weight in weights]
    parts = [math.ceil(samples * share) for share in shares]
    total = sum(parts)
    needed = max((total * share + 1) / part for share, part in zip(shares, parts, strict=True))
    return max(_SURPLUS, needed - 1)


def _cache_directory(request: SplitRequest, weights: Sequence[float], cache_dir: str | None) -> Path:
    """The directory of this split's indices; everything that shapes them is in its name."""
    key = json.dumps(
        {
            "data": request.plan.data.fingerprint,
            "prefixes": request.plan.data.blend.prefixes,
            "weights": weights,
            "split": request.split.name,
            "bounds": request.plan.bounds,
            "samples": request.samples,
            "seq_length": request.seq_length,
            "seed": request.seed,
        }
    )
    root = Path(cache_dir) if cache_dir else Path(request.plan.data.blend.prefixes[0]).parent / "index_cache"

    def writable() -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--data.cache_dir: cannot make '{root}' ({error.strerror})") from error
        if not os.access(root, os.W_OK):
            raise UserError(f"--data.cache_dir: '{root}' cannot be written; name a directory that can")

    agree(writable)
    return root / hashlib.sha256(key.encode()).hexdigest()[:24]


def _shared_name(final: Path) -> Path:
    """The same directory on every rank: the finished one, or a new one that becomes it when all have built.

    A run that is killed while it builds leaves a directory that no later run looks at.
    """
    name = [str(final) if final.is_dir() else f"{final}.building-{uuid.uuid4().hex[:8]}"]
    dist.broadcast_object_list(name, src=0)
    return Path(name[0])


def _use(request: SplitRequest, dataset: Any, lengths: list[np.ndarray]) -> list[SplitUse]:
    """Counts the samples that the run reads from each dataset."""
    if isinstance(dataset, BlendedDataset):
        counts = np.bincount(dataset.dataset_index[: request.samples], minlength=len(lengths)).tolist()
    else:
        counts = [request.samples]
    uses = []
    for prefix, length, samples in zip(request.plan.data.blend.prefixes, lengths, counts, strict=True):
        tokens = int(length.sum())
        # The last sample needs one token more than it has: its labels are shifted by one.
        needed = samples * request.seq_length + 1 if samples else 0
        uses.append(
            SplitUse(
                name=dataset_name(prefix),
                documents=len(length),
                tokens=tokens,
                samples=samples,
                epochs=math.ceil(needed / tokens),
                share=needed / tokens,
            )
        )
    return uses
