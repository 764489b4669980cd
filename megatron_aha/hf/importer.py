"""From a Hugging Face model to a checkpoint of ours, one weight at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_aha.checkpoint.format import CheckpointReader, CheckpointWriter, FileRecord, complete_steps
from megatron_aha.checkpoint.tensor_file import Deferred, in_shards
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.errors import UserError, nearest
from megatron_aha.hf.card import write_origin
from megatron_aha.hf.mapping import Weight, shape_of, weights
from megatron_aha.hf.source import Source, open_source

# About the size of a file.
SHARD_BYTES = 2**30

# Tables that old versions of transformers stored beside the weights, and that are computed anew.
_IGNORED = (".rotary_emb.inv_freq", ".attention.bias", ".masked_bias")


def import_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    check: bool = True,
    say: Callable[[str], None] = print,
) -> Path:
    """Writes step 0 of a run folder from a Hugging Face folder or a GGUF file, and compares the logits.

    Args:
        source: folder with config.json and safetensors, or a ``.gguf`` file.
        output: run folder; a step 0 in it is replaced, any other step refused.
        dtype: of the written weights; None keeps each as it is.
        shard_bytes: size at which the next file is begun.
        check: compare the logits of both models afterwards.
        say: told what is done and found.

    Returns:
        The step folder. Its model is dense unless the source has routers.

    Raises:
        UserError: the source is not supported or incomplete, or the logits differ (the output is then
            removed).
    """
    output = Path(output)
    if output.is_dir() and any(complete_steps(output)):
        raise UserError(
            f"--output {output} is the folder of a training run; choose another for the imported model"
        )
    opened = open_source(source)
    model, aha = opened.model, opened.aha
    plan = list(weights(model, aha))
    _check_plan(opened, plan, model, aha)
    routers = "" if aha is None else f", with routers (window {aha.window})"
    say(f"importing {source}: {model.num_layers} layers, hidden {model.hidden_size}{routers}")
    with CheckpointWriter(output, 0, model, aha) as writer, tempfile.TemporaryDirectory() as carried:
        records = _write(opened, plan, model, writer, dtype, shard_bytes)
        opened.carry(Path(carried))
        write_origin(Path(carried), Path(source), opened)
        folder = writer.finish(records, source_dir=carried)
    _warn_about_vocabulary(folder, model, say)
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


def _write(
    source: Source,
    plan: list[Weight],
    model: ModelConfig,
    writer: CheckpointWriter,
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> list[FileRecord]:
    """Reads, converts and writes all weights, one at a time."""
    records: list[FileRecord] = []
    with tqdm(total=len(plan), desc="import", unit="weight", leave=False, disable=None) as progress:

        def converted(weight: Weight, part: Callable[[str], Tensor]) -> Tensor:
            whole = weight.rule.merge([part(name) for name in weight.theirs], model)
            return whole.to(dtype or whole.dtype)

        def read(weight: Weight) -> Tensor:
            progress.update()
            return converted(weight, source.read)

        named = (
            (weight.ours, Deferred(converted(weight, source.outline), partial(read, weight)))
            for weight in plan
        )
        for tensors in in_shards(named, shard_bytes):
            records.append(writer.write_file(f"weights_{len(records):05d}.safetensors", tensors))
    return records


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
