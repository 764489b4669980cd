"""Arguments that cannot be computed are refused in one sentence that names them and both values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aha_kernels import InputError, aha_attention


def attend(**changes: Any) -> None:
    q = torch.randn(1, 8, 4, 16)
    arguments: dict[str, Any] = {
        "q": q,
        "k": q[:, :, :2],
        "v": q[:, :, :2],
        "route": torch.ones(1, 8, 4),
        "window": 4,
    }
    aha_attention(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 0}, "window is 0"),
        ({"window": -3}, "window is -3"),
        ({"window": None}, "window is None"),
        ({"window": 2.0}, "window is 2.0"),
        ({"num_sink_tokens": -1}, "num_sink_tokens is -1"),
        ({"q": torch.randn(1, 8, 64)}, r"\[1, 8, 64\]"),
        (
            {"k": torch.randn(1, 8, 3, 16), "v": torch.randn(1, 8, 3, 16)},
            "4 query heads .* 3 key-value heads",
        ),
        ({"v": torch.randn(1, 7, 2, 16)}, r"\[1, 8, 2, 16\] and \[1, 7, 2, 16\]"),
        ({"k": torch.randn(1, 8, 2, 8), "v": torch.randn(1, 8, 2, 8)}, "batch or head_dim"),
        ({"v": torch.randn(1, 8, 2, 16).double()}, "float32 and torch.float64"),
        ({"route": torch.ones(1, 8, 2)}, r"\[1, 8, 4\] like q, but is \[1, 8, 2\]"),
        ({"route": torch.ones(1, 8, 4).int()}, "route must be float32"),
        ({"route": torch.full((1, 8, 4), 0.5)}, "other than 0 and 1"),
        ({"query_offset": -1}, "query_offset is -1"),
        ({"key_start": torch.zeros(2, dtype=torch.int32)}, r"key_start .* \[2\]"),
        ({"key_end": torch.zeros(1)}, "key_end must hold one integer"),
        ({"cu_seqlens": torch.tensor([0, 5, 4, 8], dtype=torch.int32)}, "4 follows 5"),
        ({"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, "0 to 5, .* 0 to the number of tokens, 8"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, "cu_seqlens must be int32"),
        ({"cu_seqlens": torch.tensor([0, 8]), "query_offset": 2}, "cannot be combined"),
        ({"router_grad": "sampled:0"}, "sampled:0"),
        ({"router_grad": "sometimes"}, "sometimes"),
        ({"backend": "cudnn"}, "backend is 'cudnn'"),
        ({"backend": "flash"}, "backend='flash' cannot compute this call: .*; backend='torch' can"),
    ],
)
def test_is_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        attend(**changes)
    assert len(str(caught.value).splitlines()) == 1


def test_the_same_arguments_without_the_fault_are_accepted() -> None:
    attend()
    attend(window=100, cu_seqlens=torch.tensor([0, 0, 3, 8], dtype=torch.int32))
