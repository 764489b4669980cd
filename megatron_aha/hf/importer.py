"""From a Hugging Face model to a checkpoint of ours, one weight at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_aha.checkpoint.file_pool import write_files
from megatron_aha.checkpoint.format import CheckpointReader, CheckpointWriter, complete_steps
from megatron_aha.checkpoint.journal import Journal
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.merge import model_difference
from megatron_aha.config.model import ModelConfig
from megatron_aha.errors import UserError, nearest
from megatron_aha.hf.card import write_origin
from megatron_aha.hf.import_work import ImportWork
from megatron_aha.hf.mapping import Weight, shape_of, weights
from megatron_aha.hf.source import Source, open_source

# About the size of a file.
SHARD_BYTES = 2**30

# Beside the checkpoint's temporary folder: what is in it.
NOTES = ".import"

# Tables that old versions of transformers stored beside the weights, and that are computed anew.
_IGNORED = (".rotary_emb.inv_freq", ".attention.bias", ".masked_bias")


def import_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    workers: int = 1,
    check: bool = True,
    say: Callable[[str], None] = print,
) -> Path:
    """Writes step 0 of a run folder from a Hugging Face folder or a GGUF file, and compares the logits.

    Stopped at any moment and called again with the same arguments, it goes on where it stopped.

    Args:
        source: folder with config.json and safetensors, or a ``.gguf`` file.
        output: run folder; a step 0 of a model of the same sizes in it is replaced, any other step refused.
        dtype: of the written weights; None keeps each as it is.
        shard_bytes: size at which the next file is begun.
        workers: processes that convert, each a file at a time.
        check: compare the logits of both models afterwards.
        say: told what is done and found.

    Returns:
        The step folder. Its model is dense unless the source has routers.

    Raises:
        UserError: the source is not supported or incomplete, or the logits differ (the output is then
            removed), or a file cannot be written (the finished ones are kept).
    """
    output = Path(output)
    opened, work, writer = _prepare(source, output, dtype, shard_bytes, workers)
    say(_described(source, opened))
    journal = Journal(output / NOTES, writer.temporary)
    with journal.opened(work.made_from(), say), tempfile.TemporaryDirectory() as carried:
        records = write_files(work, journal, workers=workers, label="import", say=say)
        opened.carry(Path(carried))
        write_origin(Path(carried), Path(source), opened)
        folder = writer.finish(records, source_dir=carried)
        journal.remove()
    _warn_about_vocabulary(folder, opened.model, say)
    if check:
        # Megatron-core takes seconds to import: what is wrong with a source is told before
        from megatron_aha.parallel.platform import prepare_platform

        prepare_platform()
        from megatron_aha.hf.check import check_import

        reader = CheckpointReader(folder)
        try:
            say(f"logits: {check_import(reader, opened, dtype)}")
        except UserError as error:
            shutil.rmtree(folder)
            raise UserError(f"{error}; {folder} was removed") from error
    say(f"wrote {folder}")
    return folder


def describe_import(
    source: str | Path,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    workers: int = 1,
    say: Callable[[str], None] = print,
) -> None:
    """Says what ``import_checkpoint`` would write and need, of the source's headers alone. Arguments as there."""
    output = Path(output)
    opened, work, writer = _prepare(source, output, dtype, shard_bytes, workers)
    say(_described(source, opened))
    total, at_once = sum(work.sizes), min(workers, len(work.names))
    say(
        f"would write {len(work.names)} files, {total / 1e9:.2f} GB of weights ({work.parameters} parameters), "
        f"the largest {max(work.sizes) / 1e9:.2f} GB, to {writer.final}"
    )
    peak = work.peak_bytes() / 1e9
    say(f"weights in memory at once: at most {peak:.2f} GB in each of {at_once} processes")
    say(
        f"the comparison of logits at the end holds one model at a time, in fp32, {4 * work.parameters / 1e9:.2f} GB; "
        "--skip-logits-check leaves it out"
    )
    folder = next(parent for parent in [output, *output.resolve().parents] if parent.exists())
    free = shutil.disk_usage(folder).free
    lacking = f", {(total - free) / 1e9:.2f} GB too little" if free < total else ""
    say(f"free on the disk of --output: {free / 1e9:.2f} GB{lacking}")


def _prepare(
    source: str | Path, output: Path, dtype: torch.dtype | None, shard_bytes: int, workers: int
) -> tuple[Source, ImportWork, CheckpointWriter]:
    """Opens and checks the source and the output, of which nothing is written yet."""
    if output.is_dir() and any(complete_steps(output)):
        raise UserError(
            f"--output {output} is the folder of a training run; choose another for the imported model"
        )
    if output.is_file():
        raise UserError(f"--output {output} is a file, not a folder; choose another folder")
    if output.resolve() == Path(source).resolve():
        raise UserError(
            f"--output {output} is the source itself; choose another folder for the imported model"
        )
    if workers > 1 and Path(source).is_file():
        raise UserError(
            f"--workers {workers}: one process reads a .gguf file as a whole; leave --workers out"
        )
    opened = open_source(source)
    _check_same_model(output, opened.model)
    plan = list(weights(opened.model, opened.aha))
    _check_plan(opened, plan, opened.model, opened.aha)
    writer = CheckpointWriter(output, 0, opened.model, opened.aha)
    return opened, ImportWork(opened, plan, writer, dtype, shard_bytes), writer


def _check_same_model(output: Path, model: ModelConfig) -> None:
    """Raises UserError when the output holds an import of another model, which would be lost."""
    if not complete_steps(output):
        return
    difference = model_difference(CheckpointReader(output, checksums=False).model, model)
    if difference is not None:
        name, there, here = difference
        raise UserError(
            f"--output {output} holds another imported model: {name} is {there} there, and {here} in the source; "
            "choose another folder, or remove that one"
        )


def _described(source: str | Path, opened: Source) -> str:
    routers = "" if opened.aha is None else f", with routers (window {opened.aha.window})"
    return f"importing {source}: {opened.model.num_layers} layers, hidden {opened.model.hidden_size}{routers}"


def _check_plan(source: Source, plan: list[Weight], model: ModelConfig, aha: AHAConfig | None) -> None:
    """Raises UserError unless the source has exactly the weights of its configuration, in their shapes."""
    available = set(source.names())
    wanted = {name for weight in plan for name in weight.theirs}
    missing = sorted(wanted - available)
    if missing:
        raise UserError(
            f"the source lacks {len(missing)} weights of its configuration, the first is '{missing[0]}'"
            f"{nearest(missing[0], available - wanted)}"
        )
    strangers = sorted(name for name in available - wanted if not name.endswith(_IGNORED))
    if model.tied_embeddings and "lm_head.weight" in strangers:
        if not torch.equal(source.read("lm_head.weight"), source.read("model.embed_tokens.weight")):
            raise UserError(
                "the source says tie_word_embeddings = true, but its lm_head.weight differs from its "
                "embed_tokens.weight; set tie_word_embeddings to false in its config.json to keep both"
            )
        strangers.remove("lm_head.weight")
    if strangers:
        raise UserError(
            f"the source holds {len(strangers)} weights that this architecture does not have, the first is "
            f"'{strangers[0]}'"
        )
    for weight in plan:
        for name, shape in zip(weight.theirs, shape_of(weight, model, aha), strict=True):
            found = source.outline(name).shape
            if found != shape:
                raise UserError(
                    f"the source's '{name}' has shape {list(found)}, its configuration says {list(shape)}"
                )


def _warn_about_vocabulary(folder: Path, model: ModelConfig, say: Callable[[str], None]) -> None:
    """Says so when the tokenizer knows more tokens than the embedding has rows."""
    tokenizer = folder / "source" / "tokenizer.json"
    if not tokenizer.exists():
        return
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(tokenizer)).get_vocab_size(with_added_tokens=True)
    if tokens > model.vocab_size:
        say(
            f"warning: the tokenizer has {tokens} tokens, the embedding {model.vocab_size} rows: "
            "text that uses the last ones cannot be trained on"
        )
