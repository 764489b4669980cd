"""Compiles the Triton kernels for a GPU that need not be there, and prints what the machine code holds as
JSON.

    python -m tests.kernels.compile_kernels 90 128

compiles for sm_90 and head_dim 128 with bf16 tensors, each kernel with the tile it would be launched with.
Run it in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from aha_kernels import triton_backward, triton_decode, triton_forward
from aha_kernels.triton_tiles import Tile, decode_tile, forward_tile, key_value_tile, probe_tile, query_tile

GROUP = 4
VALUES = {"Q", "K", "V", "OUT", "D_OUT", "D_Q", "D_K", "D_V"}
FLOATS = {"LSE", "LSE_HERE", "DELTA", "D_ROUTE", "PART_OUT", "PART_LSE"}
BYTES = {"LISTED", "ROUTE"}
REALS = {"scale", "softmax_scale", "weight"}


def kernels(head_dim: int, capability: int) -> list[tuple[Any, Tile, dict[str, Any]]]:
    """Returns each kernel with its tile and its own compile-time arguments."""
    dtype = torch.bfloat16
    forward = forward_tile(head_dim, dtype, capability)
    query = query_tile(head_dim, dtype, capability)
    return [
        (triton_forward.near_forward_kernel, forward, {"SINKS": 0}),
        (triton_forward.rows_forward_kernel, forward, {"PROBE": False}),
        (triton_forward.rows_forward_kernel, probe_tile(head_dim, dtype, capability), {"PROBE": True}),
        (triton_backward.near_query_kernel, query, {"SINKS": 0, "ROUTER_GRAD": True}),
        (triton_backward.rows_query_kernel, query, {}),
        (triton_backward.key_value_kernel, key_value_tile(head_dim, dtype, capability), {"SINKS": 0}),
        (triton_decode.decode_split_kernel, decode_tile(head_dim, dtype, capability), {"PAGED": True}),
    ]


def argument_type(name: str, is_constant: bool) -> str:
    """Returns the Triton type of a kernel argument, which its name tells."""
    if is_constant:
        return "constexpr"
    if name in VALUES:
        return "*bf16"
    if name in FLOATS:
        return "*fp32"
    if name in BYTES:
        return "*u8"
    if name.isupper():
        return "*i32"
    return "fp32" if name in REALS else "i32"


def compile_kernel(kernel: Any, tile: Tile, constants: dict[str, Any], head_dim: int, capability: int) -> Any:
    """Returns the compiled kernel; pointers and strides are multiples of 16, as in a launch."""
    constants = constants | {
        "GROUP": GROUP,
        "D": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "PRECISION": "tf32",
    }
    signature = {p.name: argument_type(p.name, p.is_constexpr) for p in kernel.params}
    aligned = [
        i for i, p in enumerate(kernel.params) if signature[p.name][0] == "*" or p.name.startswith("stride")
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def count_instructions(cubin: bytes, pattern: str) -> int:
    """Returns how many instructions of the machine code match a regular expression."""
    binary = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([binary, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return len(re.findall(pattern, text))


def report(head_dim: int, capability: int) -> list[dict[str, Any]]:
    """Returns, for each kernel: its name, spills, shared memory in bytes, and tensor-core instructions."""
    rows = []
    for kernel, tile, constants in kernels(head_dim, capability):
        compiled = compile_kernel(kernel, tile, constants, head_dim, capability)
        cubin = compiled.asm["cubin"]
        rows.append(
            {
                "kernel": kernel.__name__,
                "constants": constants,
                "tile": [tile.rows, tile.keys, tile.warps, tile.stages],
                "spills": count_instructions(cubin, r"\b(?:STL|LDL)\b"),
                "shared": compiled.metadata.shared,
                "wgmma": count_instructions(cubin, r"\bHGMMA\b"),
                "mma": count_instructions(cubin, r"\bHMMA\b"),
                "async_copies": count_instructions(cubin, r"\b(?:LDGSTS|UTMALDG)\b"),
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(report(head_dim=int(sys.argv[2]), capability=int(sys.argv[1]))))
