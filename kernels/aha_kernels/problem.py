"""The arguments of one attention call that are not tensors of values: who may see whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aha_kernels.segments import Segment, split_segments


@dataclass(frozen=True)
class Problem:
    """Geometry of one call; the fields are the arguments of :func:`aha_kernels.aha_attention`."""

    window: int
    softmax_scale: float
    num_sink_tokens: int = 0
    query_offset: int | Tensor = 0
    key_start: Tensor | None = None
    key_end: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def segments(self, batch: int, num_queries: int, num_keys: int) -> list[Segment]:
        """Returns the independent segments of the call; reads the index tensors on the host."""
        return split_segments(
            batch, num_queries, num_keys, self.query_offset, self.key_start, self.key_end, self.cu_seqlens
        )

    def positions(self, batch: int, num_queries: int, device: torch.device) -> Tensor:
        """Returns int64 [batch, queries]: position of each query relative to the first key it may see."""
        rows = torch.arange(num_queries, device=device)
        if self.cu_seqlens is not None:
            borders = self.cu_seqlens.to(device=device, dtype=torch.int64)
            return (rows - borders[torch.searchsorted(borders, rows, right=True) - 1])[None]
        position = rows.expand(batch, num_queries)
        if isinstance(self.query_offset, Tensor):
            position = position + self.query_offset.to(device)[:, None]
        else:
            position = position + self.query_offset
        return position if self.key_start is None else position - self.key_start.to(device)[:, None]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of scores and sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
