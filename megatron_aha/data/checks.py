"""Everything that must hold between datasets, model and splits before anything is built. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_aha.config.run import RunConfig
from megatron_aha.data.blend import Blend, parse_blend, parse_split
from megatron_aha.data.sidecar import Sidecar, TokenizerRecord, check_files, read_sidecar
from megatron_aha.errors import UserError

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
        """Digest of all the data, another one whenever the text under a prefix is another."""
        checksums = [[sidecar.bin.sha256, sidecar.idx.sha256] for sidecar in self.sidecars]
        return hashlib.sha256(json.dumps(checksums).encode()).hexdigest()


@dataclass(frozen=True)
class SplitPlan:
    """The documents of one split.

    Args:
        data: the datasets.
        bounds: share of each dataset's documents where the split begins and ends, in 0..1.
        documents: first document and the one after the last, per dataset.
    """

    data: CheckedBlend
    bounds: tuple[float, float]
    documents: tuple[tuple[int, int], ...]


def plan_splits(config: RunConfig, *, contents: bool) -> tuple[SplitPlan, SplitPlan | None]:
    """Checks the data of a run and says which documents train and which validate; builds nothing.

    Args:
        config: the run.
        contents: compare the files' checksums too (those of files up to 2 GiB), which reads them whole.

    Returns:
        Training and, when ``training.eval_interval`` is not 0, validation.

    Raises:
        UserError: data that is missing, damaged, made for another vocabulary, or too little for a split.
    """
    data, rows = config.data, config.model.vocab_size
    train_share, valid_share, _ = parse_split(data.split)
    split_option = f"--data.split {data.split}"
    blend = check_blend(parse_blend(data.blend, "--data.blend"), rows, contents=contents)
    train = _plan(blend, (0.0, train_share), "training", split_option)
    if config.training.eval_interval == 0:
        return train, None
    if not data.valid_blend:
        return train, _plan(blend, (train_share, train_share + valid_share), "validation", split_option)
    if valid_share > 0:
        raise UserError(
            f"--data.valid_blend gives the validation data, but {split_option} keeps a share of --data.blend "
            "for validation too; write --data.split 100,0,0"
        )
    own = check_blend(parse_blend(data.valid_blend, "--data.valid_blend"), rows, contents=contents)
    prefixes = (blend.blend.prefixes[0], own.blend.prefixes[0])
    _refuse_other_tokenizer(prefixes, (blend.sidecars[0], own.sidecars[0]))
    return train, _plan(own, (0.0, 1.0), "validation", "--data.valid_blend")


def check_model_tokenizer(checkpoint: str, plan: SplitPlan) -> None:
    """Compares the data's tokenizer with the one that the checkpoint carries, if it carries one.

    Raises:
        UserError: they are different: the ids would mean other text to the model.
    """
    from megatron_aha.hf.tokenizer import checkpoint_digests

    record = plan.data.sidecars[0].tokenizer
    digests = []
    for digest in checkpoint_digests(checkpoint):
        if digest == record.sha256:
            return
        digests.append(digest)
    if digests:
        raise UserError(
            f"dataset '{plan.data.blend.prefixes[0]}' was made with tokenizer '{record.name}' (vocabulary "
            f"{record.sha256[:16]}...), but --checkpoint.init_from '{checkpoint}' carries another one "
            f"({digests[0][:16]}...); preprocess the text with --tokenizer {checkpoint}"
        )


def check_blend(blend: Blend, vocab_size: int, *, contents: bool) -> CheckedBlend:
    """Reads the sidecars of a blend and compares them with their files, each other and the model.

    Args:
        blend: the datasets.
        vocab_size: rows of the model's embedding.
        contents: compare the files' checksums too (those of files up to 2 GiB), which reads them whole.

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
    _refuse_other_tokenizer(blend.prefixes, sidecars)
    return CheckedBlend(blend, tuple(sidecars), sidecars[0].tokenizer.eod_id)


def _refuse_other_tokenizer(prefixes: Sequence[str], sidecars: Sequence[Sidecar]) -> None:
    first = sidecars[0].tokenizer
    for prefix, sidecar in zip(prefixes, sidecars, strict=True):
        other = sidecar.tokenizer
        if not other.documents_look_as(first):
            raise UserError(
                f"datasets '{prefixes[0]}' and '{prefix}' were made differently: tokenizer '{first.name}' "
                f"({first.vocab_size} ids, {_frame(first)}) and '{other.name}' "
                f"({other.vocab_size} ids, {_frame(other)}); preprocess both with one tokenizer, --bos and --eod"
            )


def _frame(record: TokenizerRecord) -> str:
    begin = "none" if record.bos_id is None else str(record.bos_id)
    return f"beginning of document {begin}, end {record.eod_id}"


def _plan(data: CheckedBlend, bounds: tuple[float, float], purpose: str, option: str) -> SplitPlan:
    """Cuts a split by the rounding that Megatron-core uses; every dataset must give it a document."""
    ranges = []
    for prefix, sidecar in zip(data.blend.prefixes, data.sidecars, strict=True):
        begin, end = (int(round(bound * float(sidecar.documents))) for bound in bounds)
        if begin >= end:
            instead = ", or turn evaluation off with --training.eval_interval 0"
            raise UserError(
                f"{option}: {purpose} gets none of the {sidecar.documents} documents of '{prefix}'; give it "
                f"a larger share or preprocess more documents{instead if purpose == 'validation' else ''}"
            )
        ranges.append((begin, end))
    return SplitPlan(data, bounds, tuple(ranges))
