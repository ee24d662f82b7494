"""What Triton's interpreter needs to run our kernels with the NumPy that is installed."""

import importlib
import math
import os
from functools import cache
from typing import Any

import numpy as np
import torch


def take_loop_bounds_from_memory() -> None:
    """Let a loop's bound be a value that a kernel has loaded.

    Triton 3.6 turns it into an integer by ``int`` of an array with one element, which NumPy 2.4 refuses.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_index


def multiply_bfloat16() -> None:
    """Let ``tl.dot`` take bfloat16: Triton 3.6's interpreter multiplies the bits as if they were integers."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, interpreter.tl.float32)

    def dot_of_widened(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    builder.create_dot = dot_of_widened


def subtract_bfloat16() -> None:
    """Let kernels subtract bfloat16: Triton 3.6's interpreter subtracts the bits. Differences have to be exact."""
    _compute_bfloat16("create_fsub", np.subtract)


def scale_bfloat16() -> None:
    """Let kernels multiply bfloat16 without ``tl.dot``: Triton 3.6's interpreter multiplies the bits.

    Products have to be exact.
    """
    _compute_bfloat16("create_fmul", np.multiply)


def _compute_bfloat16(name: str, compute: Any) -> None:
    """Let the interpreter compute a function of two bfloat16 operands with their numbers."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    plain = getattr(builder, name)

    def compute_numbers(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != interpreter.tl.bfloat16:
            return plain(self, a, b)
        wide_a, wide_b = ((x.data.astype(np.uint32) << 16).view(np.float32) for x in (a, b))
        bits = compute(wide_a, wide_b).view(np.uint32) >> 16
        return interpreter.TensorHandle(bits.astype(np.uint16), a.dtype.scalar)

    setattr(builder, name, compute_numbers)


def convert_e4m3() -> None:
    """Convert from and to e4m3 as GPUs do: Triton 3.6's interpreter loses carries, and has no NaN there."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    convert, e4m3 = interpreter._convert_float, interpreter.tl.float8e4nv
    numbers = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, str(e4m3): torch.float8_e4m3fn}

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if e4m3 not in (source, target):
            return convert(data, source, target, rounding)
        bits = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        found = bits.view(numbers[str(source)]).to(numbers[str(target)])
        words = {1: np.uint8, 2: np.uint16, 4: np.uint32}[found.element_size()]
        return found.view(torch.uint8).numpy().view(words).reshape(data.shape)

    interpreter._convert_float = converted


def multiply_rows_alike(a: Any, b: Any, dtype: Any) -> Any:
    """Multiply as ``np.matmul`` does, with the same summation order for every row, which BLAS does not guarantee."""
    return np.einsum("ik,kj->ij", a, b, dtype=dtype, optimize=False)


def spare_repeated_work() -> None:
    """Keep what Triton 3.6's interpreter finds out anew for each call and each value: most of its time went there."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    _patch_language_once(interpreter)
    _keep_dtypes(interpreter)
    _keep_types_of_shapes(interpreter.tl.core)
    _keep_types_of_blocks(interpreter.tl.core)
    _keep_shapes(interpreter.tl.core)
    _compare_shapes_at_once(interpreter.tl.core, interpreter.TritonSemantic)
    _leave_out_dropped_checks(interpreter.TritonSemantic)


def _patch_language_once(interpreter: Any) -> None:
    """Patch the language for a kernel's launch, and not again for each function of the same file that it calls."""
    patched: set[str] = set()
    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore

    def patch_once(function: Any) -> Any:
        if function.__module__ in patched:
            return None  # only a launch, which comes first, uses the scope that it gets
        patched.add(function.__module__)
        return patch(function)

    def restore_and_forget(scope: Any) -> None:
        patched.clear()
        restore(scope)

    interpreter._patch_lang = patch_once
    interpreter._LangPatchScope.restore = restore_and_forget


def _keep_dtypes(interpreter: Any) -> None:
    """Keep the NumPy dtypes of scalars; for each value the interpreter builds a dictionary of all of them."""
    get = interpreter._get_np_dtype
    get_of_scalar = cache(lambda name: get(interpreter.tl.dtype(name)))

    def get_kept(kind: Any) -> Any:
        return get_of_scalar(kind.scalar.name) if type(kind.scalar) is interpreter.tl.dtype else get(kind)

    interpreter._get_np_dtype = get_kept


def _keep_types_of_shapes(core: Any) -> None:
    """Keep the types of tuples of integers, which shapes are."""
    find = core._type_for_tuple_values
    find_of_integers = cache(find)

    def find_kept(values: Any, fields: Any = None) -> Any:
        numbers = tuple(x.value if type(x) is core.constexpr else x for x in values)
        is_plain = fields is None and all(type(x) is int for x in numbers)
        return find_of_integers(numbers) if is_plain else find(values, fields)

    core._type_for_tuple_values = find_kept


def _keep_types_of_blocks(core: Any) -> None:
    """Keep the attributes of types of blocks of numbers, which never change."""
    create, kept = core.block_type.__init__, dict[tuple[Any, ...], dict[str, Any]]()

    def create_kept(self: Any, element_type: Any, shape: Any) -> None:
        sizes = [x.value if type(x) is core.constexpr else x for x in shape]
        if type(element_type) is not core.dtype or not all(type(x) is int for x in sizes):
            create(self, element_type, shape)
            return
        key = (element_type.name, *sizes)
        if key not in kept:
            create(self, element_type, shape)
            kept[key] = dict(vars(self))
        vars(self).update(kept[key])

    core.block_type.__init__ = create_kept


def _keep_shapes(core: Any) -> None:
    """Keep what tensors of the same shape have in common."""
    find = cache(lambda sizes: (core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(x) for x in sizes])))

    def create(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = find(tuple(type.shape) if type.is_block() else ())

    core.tensor.__init__ = create


def _compare_shapes_at_once(core: Any, semantic: Any) -> None:
    """Compare shapes as lists, without a value of the language for each size; broadcast what has to be."""
    equals, broadcast = core.tuple.__eq__, semantic.broadcast_impl_value

    def equals_list(self: Any, other: Any) -> Any:
        sizes = other.values if type(other) is core.tuple else other
        is_plain = type(sizes) is list and all(type(x) is int for x in sizes)
        return core.constexpr(self.values == sizes) if is_plain else equals(self, other)

    def broadcast_others(self: Any, x: Any, y: Any) -> Any:
        shapes = [each.type.shape.values if each.type.is_block() else None for each in (x, y)]
        return (x, y) if shapes[0] == shapes[1] else broadcast(self, x, y)

    core.tuple.__eq__ = equals_list
    semantic.broadcast_impl_value = broadcast_others


def _leave_out_dropped_checks(semantic: Any) -> None:
    """Compute no check for overflow whose result ``device_assert`` drops, as it does unless it debugs."""
    check = semantic.binary_op_sanitize_overflow_impl

    def check_to_debug(self: Any, *operands: Any) -> None:
        if self.builder.options.debug:
            check(self, *operands)

    semantic.binary_op_sanitize_overflow_impl = check_to_debug
