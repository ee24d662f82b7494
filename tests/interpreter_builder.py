"""Operations of the interpreter's builder that spend less on the small blocks of tests, and give the same results.

For these, NumPy takes a fraction of the time of what surrounds it: checks of sizes that follow from types, and NumPy's
own functions that are written in Python.
"""

import math
import sys
from typing import Any

import numpy as np

COPIED_NUMBERS = 4096
"""Blocks of up to as many numbers are copied when they are broadcast, which takes less than a view of them."""


def make_operations_cheap(interpreter: Any) -> None:
    """Replace operations of the interpreter's builder, and the constructor of its values."""
    _keep_sizes(interpreter)
    _convert_bfloat16(interpreter)
    _shape_blocks(interpreter)


def _keep_sizes(interpreter: Any) -> None:
    """Keep how large a type's numbers may be; the interpreter derives it twice for each value."""
    handle, builder, pointer = interpreter.TensorHandle, interpreter.InterpreterBuilder, interpreter.tl.pointer_type

    def max_bytes(kind: Any) -> Any:
        try:
            return kind.max_bytes
        except AttributeError:
            kind.max_bytes = sys.maxsize if isinstance(kind, pointer) else max(8, kind.primitive_bitwidth) // 8
            return kind.max_bytes

    def create(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > max_bytes(dtype):
            self.__post_init__()  # which raises

    def fitting(output: Any, kind: Any) -> Any:
        if output.itemsize > max_bytes(kind):
            output = output.astype(interpreter._get_np_dtype(kind))
        return handle(output, kind)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        return fitting(op(lhs.data, rhs.data), lhs.dtype.scalar)

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        return fitting(op(lhs.data, rhs.data, other.data), other.dtype.scalar)

    handle.__init__, builder.binary_op, builder.ternary_op = create, binary_op, ternary_op


def _convert_bfloat16(interpreter: Any) -> None:
    """Convert from and to bfloat16 by the bits that it shares with float32, for casts that ask for no rounding."""
    convert = interpreter._convert_float
    bfloat16, float32 = interpreter.tl.bfloat16, interpreter.tl.float32

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == bfloat16 and target == float32:
            return data.astype(np.uint32, order="C") << 16
        if rounding is None and source == float32 and target == bfloat16:
            bits = np.ascontiguousarray(data).view(np.uint32) >> 16
            return bits.astype(np.uint16).reshape(data.shape)
        return convert(data, source, target, rounding)

    interpreter._convert_float = converted


def _shape_blocks(interpreter: Any) -> None:
    """Add axes and repeat blocks without NumPy's functions for that, which are written in Python."""
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder

    def repeated(data: Any, shape: Any, dtype: Any) -> Any:
        found = np.empty(shape, dtype)
        found[...] = data
        return found

    def create_expand_dims(self: Any, arg: Any, axis: int) -> Any:
        return handle(arg.data[(*(slice(None),) * axis, None)], arg.dtype.scalar)

    def create_broadcast(self: Any, arg: Any, shape: Any) -> Any:
        data = arg.data
        is_small = math.prod(shape) <= COPIED_NUMBERS
        found = repeated(data, shape, data.dtype) if is_small else np.broadcast_to(data, shape)
        return handle(found, arg.dtype.scalar)

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        return handle(repeated(arg.data, ret_ty.shape, interpreter._get_np_dtype(arg.dtype)), arg.dtype.scalar)

    def create_addptr(self: Any, ptr: Any, offset: Any) -> Any:
        element_bytes = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        offsets = offset.data.astype(np.uint64)
        if element_bytes > 1:
            offsets *= element_bytes
        return handle(ptr.data + offsets, ptr.dtype)

    for each in (create_expand_dims, create_broadcast, create_splat, create_addptr):
        setattr(builder, each.__name__, each)
