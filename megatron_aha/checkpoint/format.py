"""The one checkpoint format, readable in any parallel layout and without unpickling anything.

::

    <run>/latest                        text: step_00000010, written last
    <run>/step_00000010/index.json      format, version, step, model, aha, tensors, files
    <run>/step_00000010/*.safetensors   blocks of tensors
    <run>/step_00000010/state.json      training only: schedule, consumed samples, ...
    <run>/step_00000010/source/         tokenizer, chat template, generation config of the Hugging Face source

``index.json`` maps each tensor's global name to its shape, its dtype and the blocks that make it up (file,
key, start, shape), and each file to its size and SHA-256. Weights carry Megatron-core's names with the
layer's number in the whole model; vocabulary rows are never padded. A step is written under a hidden
temporary name, checked, renamed, and only then named by ``latest``: a folder ``step_...`` is whole or damaged
afterwards, never half written.
"""

from __future__ import annotations

from megatron_aha.checkpoint.index import OPTIMIZER_PREFIX, RNG_PREFIX, FileRecord, Slice
from megatron_aha.checkpoint.reader import CheckpointReader, complete_steps, keep_newest
from megatron_aha.checkpoint.writer import CheckpointWriter

__all__ = [
    "OPTIMIZER_PREFIX",
    "RNG_PREFIX",
    "CheckpointReader",
    "CheckpointWriter",
    "FileRecord",
    "Slice",
    "complete_steps",
    "keep_newest",
]
