"""Numba kernels for CPUs, run by the threads of torch's own operations.

A kernel takes sizes, strides and addresses of tensors, as a kernel for a GPU does, and is launched with a
number of *tasks*. Every thread claims tasks until none is left, so that tasks of different length are shared out
evenly; a task's result depends on nothing but its number and the arguments::

    @kernel("x dtype num_columns factor:float")
    def multiply(tasks):
        args = arguments(tasks)
        row = np.empty(args.num_columns, np.float32)
        task = claim(tasks)
        while task < args.num_tasks:
            load(args.x, args.dtype, task * args.num_columns, row)
            for i in range(row.size):
                row[i] *= args.factor
            store(args.x, args.dtype, task * args.num_columns, row)
            task = claim(tasks)

    multiply(len(x), x=x.data_ptr(), dtype=kind(x), num_columns=x.shape[1], factor=2.0)

Kernels compute in float32; ``load`` and ``store`` convert rows of what lies in memory. No sum may be taken apart by the
number of threads or of rows. Exponentials are polynomials, because the C library's take one number at a time.

Compiled code is kept for the next process in ``$XDG_CACHE_HOME/strandline`` (``~/.cache/strandline``), by CPU and by
the sources' hash, wherever the sources lie; where nothing can be written it is compiled anew, and a warning says so.
Threads are those of the GNU OpenMP library that torch brings along on Linux: a second pool would compete with the first
for the same cores.
"""

# mypy: ignore-errors

import ctypes
import errno
import logging
import os
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from struct import Struct
from typing import Any, Final

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.core.caching import UserProvidedCacheLocator
from numba.extending import intrinsic
from torch import Tensor

from strandline import clock, env, errors, ids, signals, specs

LOGGER: Final = logging.getLogger("strandline.kernels")

FLOAT32: Final = 0
BFLOAT16: Final = 1
E4M3: Final = 2
KINDS: Final = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
"""By dtype, the numbers that ``load`` and ``store`` take."""
MEMORY_KINDS: Final = {**KINDS, torch.float8_e4m3fn: E4M3}
"""By dtype, what keys and values may be."""

SOURCES: Final = (
    Path(clock.__file__),
    Path(env.__file__),
    Path(errors.__file__),
    Path(ids.__file__),
    Path(signals.__file__),
    Path(specs.__file__),
    *sorted(path for path in Path(__file__).parent.rglob("*.py") if not path.stem.endswith("_triton")),
)
"""What compiled kernels are made of, and more: a constant of any of these modules may be part of their code."""

MATH: Final = {"contract", "reassoc", "nsz", "arcp"}
"""What the compiler may change about sums and products; not whether they are numbers."""


def kind(x: Tensor) -> int:
    """Return what ``load`` and ``store`` call a tensor's dtype."""
    return KINDS[x.dtype]


def memory_kind(x: Tensor) -> int:
    """Return what kernels call the dtype of keys or values."""
    return MEMORY_KINDS[x.dtype]


@cache
def _openmp() -> Any:
    """Return the OpenMP library that torch's threads are of, which is loaded already."""
    library = ctypes.CDLL("libgomp.so.1")
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library


@cache
def has_threads() -> bool:
    """Return whether there are threads to run kernels on."""
    try:
        return hasattr(_openmp(), "GOMP_parallel")
    except OSError:
        return False


def packed_rows(x: Tensor) -> Tensor:
    """Return a tensor whose rows lie packed in themselves, however far apart: itself, or else a copy."""
    packed = 1
    for size, stride in zip(x.shape[:0:-1], x.stride()[:0:-1], strict=True):
        if stride != packed and size != 1:
            return x.contiguous()
        packed *= size
    return x


def row_arguments(**tensors: Tensor) -> dict[str, int]:
    """Return address and stride of the rows of each tensor, by its name and ``<name>_stride``."""
    strides = {f"{name}_stride": tensor.stride(0) for name, tensor in tensors.items()}
    return {**addresses(**tensors), **strides}


def addresses(**tensors: Tensor) -> dict[str, int]:
    """Return the address of each tensor by its name."""
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


BLOCK_FIELDS: Final = "k k_block_stride k_token_stride k_head_stride v v_block_stride v_token_stride v_head_stride "
"""Where keys and values of all blocks lie."""


def block_arguments(k_BPGD: Tensor, v_BPGD: Tensor) -> dict[str, int]:
    """Return the arguments that ``BLOCK_FIELDS`` names."""
    numbers = (k_BPGD.data_ptr(), *k_BPGD.stride()[:3], v_BPGD.data_ptr(), *v_BPGD.stride()[:3])
    return dict(zip(BLOCK_FIELDS.split(), numbers, strict=True))


class Kernel:
    """A compiled function, called with the number of its tasks and its arguments by name."""

    def __init__(self, function: Any, record: np.dtype) -> None:
        self._function = function  # owns the machine code
        self._address = function.address
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.address)
        self._names = dict.fromkeys(record.names[2:])
        self._table = Struct("".join(record[name].char for name in record.names))
        self._memory = ctypes.c_int64 * len(record)

    def __call__(self, num_tasks: int, **arguments: float) -> None:
        if arguments.keys() != self._names.keys():
            raise TypeError(f"a kernel's arguments are {sorted(self._names)}, not {sorted(arguments)}")
        num_threads = min(torch.get_num_threads(), num_tasks)
        if not num_threads:
            return
        table = self._memory.from_buffer_copy(self._table.pack(0, num_tasks, *[arguments[x] for x in self._names]))
        if num_threads == 1:  # A third of the time of a team of one.
            self._run(table)
        else:
            _openmp().GOMP_parallel(self._address, table, num_threads, 0)


def kernel(fields: str) -> Callable[[Callable[[Any], None]], Kernel]:
    """Compile a kernel that takes these arguments, or fetch it from where an earlier process left it.

    Args:
        fields: names of 64-bit integers, and, where ``:float`` follows, of 64-bit floats.
    """
    names = [name.partition(":") for name in ("num_claimed", "num_tasks", *fields.split())]
    record = np.dtype([(name, np.float64 if is_float else np.int64) for name, _, is_float in names])
    signature = types.void(types.CPointer(from_dtype(record)))
    compile_it = partial(cfunc, signature, fastmath=MATH, error_model="numpy")

    def decorate(body: Callable[[Any], None]) -> Kernel:
        directory, config = cache_directory(), numba.config
        before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
        if directory is not None:
            config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = str(directory), f"{__name__}.{FlatLocator.__name__}"
            try:
                return Kernel(compile_it(cache=True)(body), record)
            except OSError as error:
                _say_uncached(str(error))  # the disk is full, say
            finally:
                config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before
        return Kernel(compile_it()(body), record)

    return decorate


class FlatLocator(UserProvidedCacheLocator):
    """Location of a compiled kernel: the folder ``numba.config.CACHE_DIR`` itself.

    By default Numba adds a folder named by the path of the sources, so that each clone of a repository and each
    virtual environment would compile the same kernels anew.
    """

    @classmethod
    def get_suitable_cache_subpath(cls, _py_file):
        """Return no folder."""
        return ""


@cache
def cache_directory() -> Path | None:
    """Return where compiled kernels of ``SOURCES`` are kept; None where nothing can be.

    Numba looks at a kernel's own file alone when it decides what is out of date, not at what it calls, nor at the
    numbers that it takes from other modules.
    """
    parts = [numba.__version__.encode(), *(path.read_bytes() for path in SOURCES)]
    digest = sha256(b"".join(parts)).hexdigest()[:16]
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = base / "strandline" / f"kernels-{digest}"
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
    except (OSError, RuntimeError) as error:
        _say_uncached(str(error))
        return None
    return directory


@cache
def _say_uncached(reason: str) -> None:
    """Log, once, that compiled kernels are not kept."""
    LOGGER.warning(
        "kernels are compiled at every start, for a minute or more, as they cannot be kept: %s; let XDG_CACHE_HOME "
        "name a folder that can be written to",
        reason,
    )


# What kernels call.


inlined = partial(njit, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorates a function that only kernels call: it is compiled into each of them.

Otherwise several kernels would define the same function, and any of the definitions could be the one that runs.
Wrappers to call it from Python and C are left out: each would contain its code once more, and take as long to compile.
"""


@intrinsic
def claim(_context: Any, tasks: Any) -> Any:
    """Return the next unclaimed task; past the last one, a number that is no task."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        counter = builder.bitcast(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, context.get_constant(types.int64, 1), "monotonic")

    return types.int64(tasks), emit


@inlined()
def arguments(tasks):
    """Return a kernel's arguments, by name."""
    return carray(tasks, 1)[0]


@intrinsic
def prefetch(_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address, which need not be one, before it is read."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = ir.PointerType(ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer, *[ir.IntType(32)] * 3])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        reads, stays, data = (ir.Constant(ir.IntType(32), number) for number in (0, 3, 1))
        builder.call(function, [builder.inttoptr(values[0], pointer), reads, stays, data])
        return context.get_dummy_value()

    return types.void(address), emit


def _pointer_to(number_type: Any) -> Any:
    """Return a function of compiled code that makes a pointer of an address."""

    @intrinsic
    def pointer(_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return types.CPointer(number_type)(address), emit

    return pointer


_float32_pointer = _pointer_to(types.float32)
_uint32_pointer = _pointer_to(types.uint32)
_uint16_pointer = _pointer_to(types.uint16)
_uint8_pointer = _pointer_to(types.uint8)
_int32_pointer = _pointer_to(types.int32)
_int64_pointer = _pointer_to(types.int64)


helper = inlined(fastmath=MATH, error_model="numpy")
"""Decorates a function that computes with floats, under the same ``fastmath`` rules as kernels."""


@inlined()
def floats(address, count):
    """Return float32 numbers in memory."""
    return carray(_float32_pointer(address), count)


@inlined()
def words(address, count):
    """Return 32-bit words in memory."""
    return carray(_uint32_pointer(address), count)


@inlined()
def ints(address, count):
    """Return int64 numbers in memory."""
    return carray(_int64_pointer(address), count)


@inlined()
def int32s(address, count):
    """Return int32 numbers in memory."""
    return carray(_int32_pointer(address), count)


@inlined()
def copy(source, target):
    """Fill the beginning of a row; Numba's own assignment of slices takes one number at a time."""
    for i in range(min(source.size, target.size)):
        target[i] = source[i]


@inlined()
def fill(row, number):
    """Fill a row with one number; as ``copy``, instead of an assignment."""
    for i in range(row.size):
        row[i] = number


@inlined()
def load(address, kind, first, row):
    """Fill a float32 row with the numbers in memory from ``first`` on."""
    if kind == FLOAT32:
        whole = carray(_float32_pointer(address + 4 * first), row.size)
        for i in range(row.size):
            row[i] = whole[i]
    else:
        half = carray(_uint16_pointer(address + 2 * first), row.size)
        words = row.view(np.uint32)
        for i in range(row.size):
            words[i] = np.uint32(half[i]) << np.uint32(16)


@inlined()
def _to_bfloat16(word):
    """Return a float32 number's word rounded, as torch rounds, to one whose lower half is zero."""
    rounded = word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
    is_nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint32(0x7FC00000) if is_nan else np.uint32(rounded & np.uint32(0xFFFF0000))


@inlined()
def store(address, kind, first, row):
    """Write a float32 row to memory from ``first`` on; to bfloat16 it is rounded as torch rounds."""
    if kind == FLOAT32:
        whole = carray(_float32_pointer(address + 4 * first), row.size)
        for i in range(row.size):
            whole[i] = row[i]
    else:
        half = carray(_uint16_pointer(address + 2 * first), row.size)
        words = row.view(np.uint32)
        for i in range(row.size):
            half[i] = np.uint16(_to_bfloat16(words[i]) >> np.uint32(16))


@inlined()
def load_e4m3(address, row):
    """Fill a float32 row with the e4m3 numbers at an address."""
    numbers = carray(_uint8_pointer(address), row.size)
    words = row.view(np.uint32)
    for i in range(row.size):
        byte = np.uint32(numbers[i])
        magnitude = np.uint32(byte & np.uint32(0x7F))
        # Below 8 there is no exponent, and the unit is 2**-9; others count from -7, those of float32 from -127.
        small = np.float32(np.float32(np.int32(magnitude)) * np.float32(2.0**-9)).view(np.uint32)
        word = np.uint32((magnitude << np.uint32(20)) + np.uint32(120 << 23))
        word = small if magnitude < np.uint32(8) else word
        word = np.uint32(0x7FC00000) if magnitude == np.uint32(0x7F) else word
        words[i] = np.uint32(word | ((byte & np.uint32(0x80)) << np.uint32(24)))


@inlined()
def store_e4m3(address, row, factor):
    """Write a float32 row times a factor to an address in e4m3: rounded to the nearest, at most 448."""
    numbers = carray(_uint8_pointer(address), row.size)
    for i in range(row.size):
        word = np.float32(row[i] * factor).view(np.uint32)
        magnitude = np.uint32(word & np.uint32(0x7FFFFFFF))
        limited = np.uint32(min(magnitude, np.uint32(0x43E00000)))
        half = np.uint32(0x7FFFF) + ((limited >> np.uint32(20)) & np.uint32(1))
        number = np.uint32(((limited + half) >> np.uint32(20)) - np.uint32(120 << 3))
        # The last place of 2**14 is worth 2**-9, as that of the smallest numbers: the sum is rounded to it.
        shifted = np.float32(limited.view(np.float32) + np.float32(2.0**14)).view(np.uint32)
        number = np.uint32(shifted - np.uint32(0x46800000)) if limited < np.uint32(0x3C800000) else number
        number = np.uint32(0x7F) if magnitude > np.uint32(0x7F800000) else number
        numbers[i] = np.uint8(number | ((word >> np.uint32(24)) & np.uint32(0x80)))


@inlined()
def round_to(kind, row):
    """Round a float32 row to what memory of this kind holds."""
    if kind == BFLOAT16:
        words = row.view(np.uint32)
        for i in range(row.size):
            words[i] = _to_bfloat16(words[i])


@inlined(fastmath={"contract"})
def exp(x):
    """Return ``e ** x`` of a float32 number within 2 units in the last place; as of -87.3 below it, of 88.3 above.

    Source: Moshier, Cephes, ``expf``.
    """
    clamped = min(max(x, np.float32(-87.3)), np.float32(88.3))
    power = np.floor(clamped * np.float32(1.44269504) + np.float32(0.5))
    rest = clamped - power * np.float32(0.693359375)
    rest = rest + power * np.float32(2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    series = series * (rest * rest) + rest + np.float32(1.0)
    scale = np.int32((np.int32(power) + 127) << 23).view(np.float32)
    return series * scale if x == x else x


@inlined(fastmath={"contract"}, error_model="numpy")
def sigmoid(x):
    """Return ``1 / (1 + e ** -x)`` of a float32 number."""
    return np.float32(1.0) / (np.float32(1.0) + exp(-x))
