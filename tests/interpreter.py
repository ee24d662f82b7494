"""Triton's interpreter, made to compute what GPUs do, with the NumPy that is installed, and in less time."""

import importlib.util
import math
import os
from functools import cache
from typing import Any

import numpy as np
import torch

from tests.interpreter_builder import make_operations_cheap
from tests.interpreter_operations import Operations

MATMUL = np.matmul
"""NumPy's own, which tests may replace."""


@cache
def prepare_interpreter() -> None:
    """Patch Triton's interpreter, if kernels run there."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    _take_loop_bounds_from_memory(interpreter)
    _multiply_blocks_of_bfloat16(interpreter)
    _compute_bfloat16(interpreter, "create_fsub", np.subtract)
    _compute_bfloat16(interpreter, "create_fmul", np.multiply)
    _convert_e4m3(interpreter)
    make_operations_cheap(interpreter)
    interpreter._patch_builtin = Operations(interpreter).patch
    _patch_language_once(interpreter)
    _keep_dtypes(interpreter)
    _keep_shapes(interpreter.tl.core)
    _leave_out_dropped_checks(interpreter.TritonSemantic)


def _take_loop_bounds_from_memory(interpreter: Any) -> None:
    """Let a loop's bound be a value that a kernel has loaded.

    Triton 3.6 turns it into an integer by ``int`` of an array with one element, which NumPy 2.4 refuses.
    """
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_index


def _multiply_blocks_of_bfloat16(interpreter: Any) -> None:
    """Let ``tl.dot`` take bfloat16: Triton 3.6's interpreter multiplies the bits as if they were integers."""
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


def _compute_bfloat16(interpreter: Any, name: str, compute: Any) -> None:
    """Let the interpreter compute a function of two bfloat16 operands with their numbers, and not with their bits.

    Results have to be exact.
    """
    builder = interpreter.InterpreterBuilder
    plain = getattr(builder, name)

    def compute_numbers(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != interpreter.tl.bfloat16:
            return plain(self, a, b)
        wide_a, wide_b = ((x.data.astype(np.uint32) << 16).view(np.float32) for x in (a, b))
        bits = compute(wide_a, wide_b).view(np.uint32) >> 16
        return interpreter.TensorHandle(bits.astype(np.uint16), a.dtype.scalar)

    setattr(builder, name, compute_numbers)


def _convert_e4m3(interpreter: Any) -> None:
    """Convert from and to e4m3 as GPUs do: Triton 3.6's interpreter loses carries, and has no NaN there."""
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


def _keep_shapes(core: Any) -> None:
    """Keep what tensors of the same shape have in common."""
    find = cache(lambda sizes: (core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(x) for x in sizes])))

    def create(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = find(tuple(type.shape) if type.is_block() else ())

    core.tensor.__init__ = create


def _leave_out_dropped_checks(semantic: Any) -> None:
    """Compute no check for overflow whose result ``device_assert`` drops, as it does unless it debugs."""
    check = semantic.binary_op_sanitize_overflow_impl

    def check_to_debug(self: Any, *operands: Any) -> None:
        if self.builder.options.debug:
            check(self, *operands)

    semantic.binary_op_sanitize_overflow_impl = check_to_debug


def multiply_rows_alike(a: Any, b: Any, dtype: Any) -> Any:
    """Multiply as ``np.matmul`` does, with the same summation order for every row, which BLAS does not guarantee.

    Every row is a product of its own, of the same shape as the others'.
    """
    return MATMUL(a[:, None, :], b, dtype=dtype)[:, 0]
