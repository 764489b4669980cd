"""From a checkpoint of ours to a folder that transformers loads: a model of its own, or with our code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_aha.checkpoint.atomic import disk_errors, keep_only, replace_folder
from megatron_aha.checkpoint.file_pool import write_files
from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.checkpoint.index import dtype_name
from megatron_aha.checkpoint.journal import Journal
from megatron_aha.errors import UserError
from megatron_aha.hf.card import write_card
from megatron_aha.hf.code import write_code
from megatron_aha.hf.configuration import write_config
from megatron_aha.hf.export_work import ExportWork
from megatron_aha.hf.faolmo import FaolmoSource, check_faolmo, faolmo_config
from megatron_aha.hf.mapping import Weight, weights
from megatron_aha.hf.source import CONFIG_FILE, GENERATION_FILE, WEIGHTS_INDEX, read_json

if TYPE_CHECKING:
    from megatron_aha.hf.check import Outcome

SHARD_BYTES = 5 * 10**9
TOKENIZER_CONFIG = "tokenizer_config.json"


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    workers: int = 1,
    overwrite: bool = False,
    check: bool = True,
    authors_format: bool = False,
    base_model: str | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Writes a Hugging Face folder from a checkpoint, and compares the logits in a fresh process.

    Stopped at any moment and called again with the same arguments, it goes on where it stopped.

    Args:
        checkpoint: run folder or step folder.
        output: folder to write; it must be absent or empty.
        dtype: of the written weights; None keeps each as it is.
        shard_bytes: largest size of a safetensors file.
        workers: processes that write, each a file at a time.
        overwrite: replace the model that ``output`` holds; a folder without one is refused all the same.
        check: compare the logits of both models before the folder gets its name.
        authors_format: write the format of the AHA authors' release (``megatron_aha.hf.faolmo``), which needs their
            modelling code.
        base_model: its name in the model card; None takes that of what was imported.
        say: told what is done and found.

    Returns:
        The folder; nothing but torch and transformers is needed to load it.

    Raises:
        UserError: the checkpoint is incomplete, the output is in use, the format cannot hold the model, or the
            logits differ (nothing is left then), or a file cannot be written (the finished ones are kept).
    """
    output = Path(output)
    reader = CheckpointReader(checkpoint)
    _check_output(output, overwrite)
    plan = list(weights(reader.model, reader.aha))
    _check_plan(reader, plan)
    if authors_format:
        check_faolmo(reader)
    kind = "dense" if reader.aha is None or not reader.aha.enabled else f"AHA, window {reader.aha.window}"
    say(f"exporting {reader.folder}: {reader.model.num_layers} layers, {kind}")
    final = output.resolve()
    temporary = final.with_name(f".tmp-{final.name}")
    work = ExportWork(reader, plan, temporary, dtype, shard_bytes, authors_format)
    journal = Journal(final.with_name(f".export-{final.name}"), temporary)
    with journal.opened(work.made_from(), say):
        with disk_errors(temporary):
            keep_only(temporary, work.names)
            _write_companions(reader, temporary, dtype, authors_format)
        write_files(work, journal, workers=workers, label="export", say=say)
        if len(work.names) > 1:
            with disk_errors(temporary):
                _write_json(temporary / WEIGHTS_INDEX, work.index())
        usage = None
        if check:
            try:
                outcome = _compare(reader, temporary, dtype, authors_format)
            except UserError:
                journal.remove()
                raise
            usage = outcome.usage
            say(f"logits: {outcome}")
        with disk_errors(temporary):
            write_card(temporary, reader, base_model, usage)
            replace_folder(temporary, final)
        journal.remove()
    say(f"wrote {output}")
    return output


def _compare(
    reader: CheckpointReader, folder: Path, dtype: torch.dtype | None, authors_format: bool
) -> Outcome:
    # Megatron-core takes seconds to import: what is wrong with a checkpoint is told before
    from megatron_aha.parallel.platform import prepare_platform

    prepare_platform()
    from megatron_aha.hf.check import check_export, check_import

    if authors_format:
        # their modelling code is not ours to run: compared with our own reading of the folder
        return check_import(reader, FaolmoSource(folder), dtype)
    return check_export(reader, folder, dtype)


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / CONFIG_FILE).is_file():
        raise UserError(f"--output {output} exists and is no exported model; choose another folder")
    if not overwrite:
        raise UserError(
            f"--output {output} holds a model already; choose another folder, or replace it with --overwrite"
        )


def _check_plan(reader: CheckpointReader, plan: list[Weight]) -> None:
    """Raises UserError when the checkpoint lacks a weight, or holds one that would be left behind."""
    wanted, available = {weight.ours for weight in plan}, set(reader.weight_names())
    if wanted - available:
        raise UserError(f"checkpoint {reader.folder} lacks the weight '{min(wanted - available)}'")
    if available - wanted:
        raise UserError(
            f"checkpoint {reader.folder} holds '{min(available - wanted)}', which its model does not have"
        )


def _write_companions(
    reader: CheckpointReader, folder: Path, dtype: torch.dtype | None, authors_format: bool
) -> None:
    """Writes configuration, generation configuration, tokenizer and, for AHA, the modelling code."""
    source: dict[str, Any] = {}
    if reader.source_dir is not None:
        shutil.copytree(reader.source_dir, folder, dirs_exist_ok=True)
        if (folder / CONFIG_FILE).exists():
            source = read_json(folder / CONFIG_FILE)
    stored = dtype or reader.dtype("embedding.word_embeddings.weight")
    if authors_format:
        config = faolmo_config(reader, dtype_name(stored), source)
    else:
        config = write_config(reader.model, reader.aha, dtype_name(stored), source)
    _write_json(folder / CONFIG_FILE, config)
    if not (folder / GENERATION_FILE).exists():
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        known = {key: value for key, value in ids.items() if value is not None}
        _write_json(folder / GENERATION_FILE, {"_from_model_config": True, **known})
    if (folder / TOKENIZER_CONFIG).exists():
        _write_json(folder / TOKENIZER_CONFIG, _for_all_versions(read_json(folder / TOKENIZER_CONFIG)))
    if "auto_map" in config:
        write_code(folder, reader.model.family)


def _for_all_versions(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Takes out of a tokenizer's configuration how it was loaded, and the class that transformers 4 lacks.

    transformers 5 writes ``TokenizersBackend`` where both know ``PreTrainedTokenizerFast``; that one returns token
    types as well unless told otherwise, which ``generate`` refuses for a decoder.
    """
    kept = {key: value for key, value in tokenizer.items() if key not in ("is_local", "local_files_only")}
    if kept.get("tokenizer_class") == "TokenizersBackend":
        kept["tokenizer_class"] = "PreTrainedTokenizerFast"
        kept.setdefault("model_input_names", ["input_ids", "attention_mask"])
    return kept


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(
        json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )
