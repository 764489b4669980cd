"""Compiles the Triton kernels for GPUs that need not be there, and tells what the machine code holds.

    python tools/compile_kernels.py --output docs/kernels-compile.md
    python tools/compile_kernels.py --architectures sm_90 --head-dims 128 --json

compiles each kernel for bf16 tensors with the tile it would be launched with, and prints or writes a table:
registers of a thread, shared memory, bytes a thread spills, instructions of the tensor cores. Takes a few
minutes for everything. Nothing runs on a GPU, and nothing here tells how fast a kernel is.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from aha_kernels.triton_tiles import Tile, kernel_tile

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
SHARED_MEMORY = {
    "sm_80": 166_912,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "gfx942": 65_536,
}  # bytes of a program
HEAD_DIMS = (64, 96, 128, 256)
GROUP = 4
VALUES = {"Q", "K", "V", "OUT", "D_OUT", "D_Q", "D_K", "D_V"}
FLOATS = {"LSE", "LSE_HERE", "DELTA", "D_ROUTE", "PART_OUT", "PART_LSE"}
BYTES = {"LISTED", "ROUTE"}
REALS = {"scale", "softmax_scale", "weight"}


@dataclass(frozen=True)
class Compiled:
    """What the machine code of one kernel holds; tensor counts instructions of tensor cores by name."""

    kernel: str
    options: str
    architecture: str
    head_dim: int
    tile: str
    registers: int
    shared: int
    spilled: int
    tensor: dict[str, int]


def shipped_kernels() -> list[tuple[Any, str, dict[str, Any]]]:
    """Returns each kernel with the name of its tile and its own compile-time arguments."""
    from aha_kernels import triton_backward, triton_decode, triton_forward

    return [
        (triton_forward.near_forward_kernel, "near", {"SINKS": 0}),
        (triton_forward.near_forward_kernel, "near", {"SINKS": 4}),
        (triton_forward.rows_forward_kernel, "rows", {"PROBE": False}),
        (triton_forward.rows_forward_kernel, "probe", {"PROBE": True}),
        (triton_backward.near_query_kernel, "query", {"SINKS": 0, "ROUTER_GRAD": True}),
        (triton_backward.near_query_kernel, "query", {"SINKS": 4, "ROUTER_GRAD": True}),
        (triton_backward.rows_query_kernel, "query", {}),
        (triton_backward.key_value_kernel, "key_value", {"SINKS": 0}),
        (triton_backward.key_value_kernel, "key_value", {"SINKS": 4}),
        (triton_decode.decode_split_kernel, "decode", {"PAGED": False}),
        (triton_decode.decode_split_kernel, "decode", {"PAGED": True}),
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


def compile_kernel(
    kernel: Any, tile: Tile, constants: dict[str, Any], head_dim: int, architecture: str
) -> Any:
    """Returns the compiled kernel; pointers and strides are multiples of 16, as in a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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
    return triton.compile(source, target=GPUTarget(*TARGETS[architecture]), options=options)


def read_cubin(cubin: bytes) -> tuple[int, int, dict[str, int]]:
    """Returns registers, spilled bytes and tensor-core instructions of NVIDIA machine code.

    Spills are what a thread keeps in local memory: the kernels have no arrays of their own there.
    """
    import triton

    programs = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(programs / "cuobjdump", "--dump-resource-usage", file.name)
        code = _output(programs / "nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {usage}")
    registers, stack, local = (int(x) for x in found.groups())
    if stack + local == 0 and re.search(r"\b(?:STL|LDL)\b", code):
        raise RuntimeError("the code uses local memory that cuobjdump does not report")
    names = ("HGMMA", "HMMA", "UTCHMMA")
    return registers, stack + local, {name: len(re.findall(rf"\b{name}\b", code)) for name in names}


def _output(program: Path, *arguments: str) -> str:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


def read_amdgcn(code: str) -> tuple[int, int, dict[str, int]]:
    """Returns registers, spilled registers in bytes and matrix instructions of AMD assembly."""
    values = {name: int(x) for name, x in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", code)}
    return values["vgpr_count"], 4 * values["vgpr_spill_count"], {"MFMA": len(re.findall(r"\bv_mfma_", code))}


def compile_all(architecture: str, head_dim: int) -> list[Compiled]:
    """Returns what every shipped kernel compiles to."""
    result = []
    for kernel, name, constants in shipped_kernels():
        tile = kernel_tile(name, head_dim, torch.bfloat16, architecture)
        compiled = compile_kernel(kernel, tile, constants, head_dim, architecture)
        asm = compiled.asm
        read = read_cubin(asm["cubin"]) if "cubin" in asm else read_amdgcn(asm["amdgcn"])
        options = ", ".join(f"{key}={value}" for key, value in constants.items())
        shape = f"{tile.rows}x{tile.keys}, {tile.warps} warps, {tile.stages} stages"
        registers, spilled, tensor = read
        kernel_name = kernel.__name__.removesuffix("_kernel")
        result.append(
            Compiled(
                kernel_name,
                options,
                architecture,
                head_dim,
                shape,
                registers,
                compiled.metadata.shared,
                spilled,
                tensor,
            )  # fmt: skip
        )
    return result


def table(rows: list[Compiled]) -> str:
    """Returns the rows as Markdown."""
    lines = [
        "| kernel | options | arch | head_dim | tile | registers | shared bytes | spilled bytes | tensor cores |",
        "|" + "---|" * 9,
    ]
    for r in rows:
        tensor = ", ".join(f"{count} {name}" for name, count in r.tensor.items() if count)
        lines.append(
            f"| {r.kernel} | {r.options} | {r.architecture} | {r.head_dim} | {r.tile} | {r.registers} | {r.shared} "
            f"| {r.spilled} | {tensor} |"
        )
    return "\n".join(lines)


def report(rows: list[Compiled]) -> str:
    """Returns the page that docs/ keeps."""
    import triton

    limits = ", ".join(f"{name} {size}" for name, size in SHARED_MEMORY.items())
    architectures, head_dims = (
        " ".join(dict.fromkeys(values))
        for values in ([row.architecture for row in rows], [str(row.head_dim) for row in rows])
    )
    return f"""# What the Triton kernels compile to

Written with triton {triton.__version__} by `python tools/compile_kernels.py --output docs/kernels-compile.md
--architectures {architectures} --head-dims {head_dims}`:
bf16 tensors, {GROUP} query heads per KV head, the tiles of `kernels/aha_kernels/triton_tiles.py`.
**Compiled only: nothing here ran on a GPU.**

Bytes of shared memory that a program may use: {limits}. HGMMA are the instructions of a warp group on sm_90,
UTCHMMA those of sm_100, MFMA AMD's. Decoding works on 16 rows, too few for them. With head_dim 256, blocks of keys
large enough for them spill in the backward kernel for keys and values, so that one stays on HMMA.

{table(rows)}
"""


def main() -> int:
    """Compiles and prints or writes; returns 1 when a kernel spills or needs too much shared memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architectures", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--head-dims", type=int, nargs="+", choices=HEAD_DIMS, default=list(HEAD_DIMS))
    parser.add_argument("--output", type=Path, help="write the Markdown report to this file")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    rows = [row for a in arguments.architectures for d in arguments.head_dims for row in compile_all(a, d)]
    if arguments.output:
        arguments.output.write_text(report(rows))
    print(json.dumps([asdict(row) for row in rows]) if arguments.json else table(rows))
    return int(any(row.spilled or row.shared > SHARED_MEMORY[row.architecture] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
