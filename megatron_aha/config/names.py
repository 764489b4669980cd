"""The words that options accept; the code that acts on them lives with the part they steer."""

from __future__ import annotations

ROPE_SCALINGS = ("llama3", "linear", "yarn", "dynamic")
GRANULARITIES = ("head", "kv_group")
BACKENDS = ("auto", "reference", "torch", "triton", "flash")
GPU_BACKENDS = ("triton", "flash")
SCHEDULES = ("cosine", "wsd", "constant")
PRECISIONS = ("fp32", "bf16", "fp16")
RECOMPUTES = ("none", "selective", "full")
BAD_STEPS = ("stop", "skip", "rollback")
