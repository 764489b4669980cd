"""Everything that must hold between datasets, model and run before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from megatron_aha.data.blend import Blend
from megatron_aha.data.sidecar import Sidecar, check_files, read_sidecar
from megatron_aha.errors import UserError

Result = TypeVar("Result")

# Bytes of a file that is still hashed whole when a run starts: a few seconds.
_HASHED_AT_START = 2 * 2**30


@dataclass(frozen=True)
class CheckedBlend:
    """A blend whose files are whole and agree with each other.

    Args:
        blend: the datasets and their weights.
        sidecars: one per dataset.
        eod_id: the id that ends every document, the same in all of them.
    """

    blend: Blend
    sidecars: tuple[Sidecar, ...]
    eod_id: int

    @property
    def fingerprint(self) -> str:
        """Checksums of all the data, which change whenever the text under a prefix does."""
        return " ".join(f"{sidecar.bin.sha256}:{sidecar.idx.sha256}" for sidecar in self.sidecars)


def check_blend(blend: Blend, vocab_size: int, *, contents: bool) -> CheckedBlend:
    """Reads the sidecars of a blend and compares them with their files, each other and the model.

    Args:
        blend: the datasets.
        vocab_size: rows of the model's embedding.
        contents: compare the files' checksums too (those up to 2 GiB; it reads them whole).

    Raises:
        UserError: a dataset is damaged, has another tokenizer than the others, or needs ids the model lacks.
    """
    sidecars = []
    for prefix in blend.prefixes:
        sidecar = read_sidecar(prefix)
        check_files(prefix, sidecar, contents=contents, up_to=_HASHED_AT_START)
        if sidecar.tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"dataset '{prefix}' was made with a vocabulary of {sidecar.tokenizer.vocab_size} "
                f"(tokenizer '{sidecar.tokenizer.name}', largest id used {sidecar.largest_id}), but the "
                f"model has --model.vocab_size {vocab_size}; preprocess the text with the model's own "
                "tokenizer"
            )
        sidecars.append(sidecar)
    first = sidecars[0].tokenizer
    for prefix, sidecar in zip(blend.prefixes, sidecars, strict=True):
        other = sidecar.tokenizer
        if (other.sha256, other.eod_id) != (first.sha256, first.eod_id):
            raise UserError(
                f"datasets '{blend.prefixes[0]}' and '{prefix}' were made differently: tokenizer "
                f"'{first.name}' ({first.vocab_size} ids, end of document {first.eod_id}) and '{other.name}' "
                f"({other.vocab_size} ids, end of document {other.eod_id}); preprocess both with one "
                "tokenizer"
            )
    return CheckedBlend(blend, tuple(sidecars), first.eod_id)


def agree(check: Callable[[], Result]) -> Result:
    """Runs a check on every rank and lets all of them fail when one does.

    A rank that raised alone would leave the others waiting in the next collective for ever.

    Returns:
        What the check returned on this rank.

    Raises:
        UserError: the first rank's complaint, on every rank.
    """
    result, complaint = None, None
    try:
        result = check()
    except UserError as error:
        complaint = str(error)
    complaints: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(complaints, complaint)
    for rank, text in enumerate(complaints):
        if text is not None:
            raise UserError(text if text == complaint else f"rank {rank}: {text}")
    return result  # type: ignore[return-value]
