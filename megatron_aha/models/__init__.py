"""Model families on Megatron-core layers."""

from megatron_aha.models.build import build_model, build_stage

__all__ = ["build_model", "build_stage"]
