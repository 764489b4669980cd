"""Files written tensor by tensor are safetensors files, and little of them is in memory at a time."""

from __future__ import annotations

import hashlib
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_aha.checkpoint.tensor_file import TYPE_NAMES, Deferred, in_files, write_tensors


def value_of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.linspace(-3, 100, torch.Size(shape).numel()).reshape(shape).to(dtype)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_every_type_comes_back_bit_for_bit(tmp_path: Path) -> None:
    # an odd number of single bytes first would leave the rest misaligned
    tensors: dict[str, Tensor | Deferred] = {"bytes": value_of(torch.uint8, 3)}
    tensors |= {str(dtype): value_of(dtype, 5, 3) for dtype in TYPE_NAMES}
    tensors |= {
        "scalar": torch.tensor(7.5),
        "empty": torch.zeros(0, 4),
        "turned": value_of(torch.float32, 4, 6).T,
    }
    tensors['ünïcode "quoted"'] = value_of(torch.float16, 1)
    digest = hashlib.sha256()
    write_tensors(tmp_path / "file", tensors, digest.update)
    found = load_file(tmp_path / "file")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert isinstance(tensor, Tensor)
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert bytes_of(found[name]).equal(bytes_of(tensor)), name
    assert digest.hexdigest() == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


def test_a_deferred_tensor_is_let_go_before_the_next_is_read(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def read(number: int) -> Tensor:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))
        value = torch.full((2**20,), float(number))
        alive.append(weakref.ref(value))
        return value

    outline = torch.empty(2**20, device="meta")
    write_tensors(tmp_path / "file", {str(n): Deferred(outline, partial(read, n)) for n in range(4)})
    assert most == 0, "an earlier tensor was still held when the next one was read"
    assert [load_file(tmp_path / "file")[str(n)].mean().item() for n in range(4)] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_value_that_was_announced_otherwise_is_refused(tmp_path: Path, value: Tensor) -> None:
    deferred = Deferred(torch.empty(2, device="meta"), lambda: value)
    with pytest.raises(ValueError, match=r"weight is .* announced was \[2\] torch.float32"):
        write_tensors(tmp_path / "file", {"weight": deferred})


def test_a_type_that_the_format_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weight has the type torch.complex64"):
        write_tensors(tmp_path / "file", {"weight": torch.zeros(2, dtype=torch.complex64)})


def test_files_hold_no_more_than_their_size_unless_one_item_does() -> None:
    sizes = {"a": 8, "b": 12, "c": 36, "d": 4, "e": 16, "f": 4}
    assert list(in_files(sizes, sizes.__getitem__, 20)) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert list(in_files([], len, 20)) == []
