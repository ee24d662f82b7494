"""Float32 GEMMs of small matrices inside Numba kernels, at the speed of the CPU's vector units.

``C = scale C + A B`` is computed a tile of C at a time: some rows by a *panel* of ``PANEL`` columns, all of it in
vector registers, which the code requests explicitly. B lies in panels, one row after another; rows of C lie ``c_row``
numbers apart; A lies in any order, ``a_row`` and ``a_col`` numbers apart. Matrices are addresses.

An element's sum runs over the depth in rising order, so that it depends on nothing but its row and its column.
"""

# mypy: ignore-errors

from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from strandline.kernels.runtime_numba import helper

HAS_WIDE_VECTORS: Final = get_host_cpu_features().get("avx512f", False)

LANES: Final = 16 if HAS_WIDE_VECTORS else 8
"""Numbers of a vector."""

PANEL: Final = 2 * LANES

TALL: Final = 8 if HAS_WIDE_VECTORS else 4
"""Rows of the largest tile: as many as the registers hold."""

VECTOR: Final = ir.VectorType(ir.FloatType(), LANES)
LOG_BYTES: Final = 2


def _tile(num_rows: int, *, solves: bool = False) -> Any:
    """Return a function of compiled code that computes one tile.

    Where it ``solves``, rows of C are those of B that come next, and A, strictly lower triangular there, multiplies
    them too: each row by what has become of those before it.
    """

    @intrinsic
    def tile(_context: Any, a: Any, a_row: Any, a_col: Any, b: Any, c: Any, c_row: Any, depth: Any, scale: Any) -> Any:
        def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            a, a_row, a_col, b, c, c_row, depth, scale = values
            int64 = ir.IntType(64)
            multiply_add = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), f"llvm.fmuladd.v{LANES}f32"
            )

            def at(address: Any, numbers: Any) -> Any:
                return builder.add(address, builder.shl(numbers, int64(LOG_BYTES)))

            def spread(number: Any) -> Any:
                nothing, lane = ir.Constant(VECTOR, ir.Undefined), ir.IntType(32)
                first = builder.insert_element(nothing, number, lane(0))
                return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(lane, LANES), [0] * LANES))

            def number_at(address: Any) -> Any:
                pointer = builder.inttoptr(address, ir.FloatType().as_pointer())
                return spread(builder.load(pointer, align=4))

            def vectors_at(address: Any) -> list[Any]:
                addresses = [at(address, int64(first)) for first in range(0, PANEL, LANES)]
                return [builder.inttoptr(address, VECTOR.as_pointer()) for address in addresses]

            def add_product(factor: Any, vectors: list[Any], sums: list[Any]) -> None:
                for vector, total in zip(vectors, sums, strict=True):
                    builder.store(builder.call(multiply_add, [factor, vector, builder.load(total)]), total)

            a_rows = [at(a, builder.mul(a_row, int64(row))) for row in range(num_rows)]
            c_rows = [vectors_at(at(c, builder.mul(c_row, int64(row)))) for row in range(num_rows)]
            zero = ir.Constant(VECTOR, [0.0] * LANES)
            sums = [[cgutils.alloca_once_value(builder, zero) for _ in vectors] for vectors in c_rows]
            with builder.if_then(builder.fcmp_unordered("!=", scale, ir.FloatType()(0.0))):
                factor = spread(scale)
                for vectors, row_sums in zip(c_rows, sums, strict=True):
                    for vector, total in zip(vectors, row_sums, strict=True):
                        builder.store(builder.fmul(factor, builder.load(vector, align=4)), total)
            with cgutils.for_range(builder, depth) as loop:
                b_row = [builder.load(v, align=4) for v in vectors_at(at(b, builder.mul(loop.index, int64(PANEL))))]
                column = builder.mul(loop.index, a_col)
                for a_first, row_sums in zip(a_rows, sums, strict=True):
                    add_product(number_at(at(a_first, column)), b_row, row_sums)
            if solves:
                for row in range(1, num_rows):
                    for before in range(row):
                        column = builder.mul(builder.add(depth, int64(before)), a_col)
                        solved = [builder.load(total) for total in sums[before]]
                        add_product(number_at(at(a_rows[row], column)), solved, sums[row])
            for vectors, row_sums in zip(c_rows, sums, strict=True):
                for vector, total in zip(vectors, row_sums, strict=True):
                    builder.store(builder.load(total), vector, align=4)
            return ir.Constant(ir.IntType(8).as_pointer(), None)

        return types.void(*[types.int64] * 7, types.float32), emit

    return tile


_tall, _four, _two, _one = (_tile(num_rows) for num_rows in (TALL, 4, 2, 1))
_solve_tall, _solve_four, _solve_two, _solve_one = (_tile(num_rows, solves=True) for num_rows in (TALL, 4, 2, 1))


@helper
def multiply(a, a_row, a_col, b, c, c_row, num_rows, depth, scale):
    """Compute ``num_rows`` rows of one panel of ``C = scale C + A B``; what C held is not read if the scale is 0."""
    row = 0
    while row < num_rows:
        left = num_rows - row
        a_tile, c_tile = a + 4 * row * a_row, c + 4 * row * c_row
        if left >= TALL:
            _tall(a_tile, a_row, a_col, b, c_tile, c_row, depth, scale)
            row += TALL
        elif left >= 4:
            _four(a_tile, a_row, a_col, b, c_tile, c_row, depth, scale)
            row += 4
        elif left >= 2:
            _two(a_tile, a_row, a_col, b, c_tile, c_row, depth, scale)
            row += 2
        else:
            _one(a_tile, a_row, a_col, b, c_tile, c_row, depth, scale)
            row += 1


@helper
def multiply_lower(a, a_row, b, c, c_row, num_rows, scale):
    """Do the same with a lower triangular A, whose ``TALL - 1`` columns past the diagonal are read as well."""
    row = 0
    while row < num_rows:
        count = min(TALL, num_rows - row)
        multiply(a + 4 * row * a_row, a_row, 1, b, c + 4 * row * c_row, c_row, count, row + count, scale)
        row += count


@helper
def substitute(a, a_row, b, num_rows):
    """Solve ``(I - A) X = B`` in one panel, in place, with a strictly lower triangular A."""
    row = 0
    while row < num_rows:
        left = num_rows - row
        a_tile, c_tile = a + 4 * row * a_row, b + 4 * row * PANEL
        if left >= TALL:
            _solve_tall(a_tile, a_row, 1, b, c_tile, PANEL, row, 1.0)
            row += TALL
        elif left >= 4:
            _solve_four(a_tile, a_row, 1, b, c_tile, PANEL, row, 1.0)
            row += 4
        elif left >= 2:
            _solve_two(a_tile, a_row, 1, b, c_tile, PANEL, row, 1.0)
            row += 2
        else:
            _solve_one(a_tile, a_row, 1, b, c_tile, PANEL, row, 1.0)
            row += 1
