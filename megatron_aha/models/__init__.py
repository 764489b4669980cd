"""Model families on Megatron-core layers."""

from megatron_aha.models.build import build_model

__all__ = ["build_model"]
