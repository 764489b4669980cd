"""Repairs faults of Triton's interpreter: test-only, and only for what our kernels do.

It keeps bf16 as raw 16-bit patterns. Its casts from fp32 cut instead of rounding to the nearest even, and its
dots and element-wise operations compute on the patterns as if they were integers, silently.
:func:`repair_bf16` rounds the casts, gives the dots fp32 copies (products of bf16 numbers are exact in fp32, as
in tensor cores) and refuses every other operation on bf16.

In triton 3.6 with NumPy 2.4 or later the bounds of a loop cannot be computed at run time, which
:func:`repair_loop_bounds` mends; later versions do the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

ELEMENTWISE = ("binary_op", "unary_op", "create_fabs", "create_fma", "create_clampf", "create_idiv")


def to_float(patterns: np.ndarray) -> np.ndarray:
    """Returns the fp32 values of bf16 patterns (uint16)."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def to_patterns(values: np.ndarray) -> np.ndarray:
    """Returns the bf16 patterns (uint16) nearest to fp32 values, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def is_bf16(handle: Any) -> bool:
    """Returns whether a tensor of the interpreter holds bf16 numbers (a pointer to them does not)."""
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def repair_loop_bounds() -> None:
    """Patches the interpreter of this process to accept arrays of one element as bounds."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_tensor


def repair_bf16() -> None:
    """Patches the interpreter of this process to compute with bf16 numbers."""
    cast, dot, convert = (
        getattr(InterpreterBuilder, name) for name in ("cast_impl", "create_dot", "create_fp_to_fp")
    )

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        to_bf16 = target.scalar == tl.bfloat16
        if is_bf16(source) and not to_bf16:
            return cast(self, TensorHandle(to_float(source.data), tl.float32), target)
        if to_bf16 and not is_bf16(source):
            return TensorHandle(to_patterns(source.data.astype(np.float32)), tl.bfloat16)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if is_bf16(source) or target.scalar == tl.bfloat16:
            return cast_impl(self, source, target)
        return convert(self, source, target, rounding)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (TensorHandle(to_float(x.data), tl.float32) if is_bf16(x) else x for x in (a, b))
        return dot(self, a, b, *rest)

    def refusing(name: str) -> Any:
        original = getattr(InterpreterBuilder, name)

        def operation(self: Any, *arguments: Any) -> Any:
            if any(is_bf16(x) for x in arguments):
                raise NotImplementedError(f"{name} on bf16 is not emulated: convert to fp32 in the kernel")
            return original(self, *arguments)

        return operation

    for name in ELEMENTWISE:
        setattr(InterpreterBuilder, name, refusing(name))
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_dot = create_dot
