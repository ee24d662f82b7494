"""Triton's interpreter, as tests prepare it, gives what NumPy gives when it repeats operations that it recorded."""

import math
import os

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter", allow_module_level=True)


@triton.jit
def _combine(x, y):
    return x * y + x, (x > y) & (y < 2)


@triton.jit
def _mixed_kernel(out, x, y, count, sums, size, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    program = tl.program_id(0)
    columns = program * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < size
    a = tl.load(x + columns, mask=is_in, other=0.0)
    b = tl.load(y + columns, mask=is_in, other=1.0)
    total = tl.zeros((BLOCK,), tl.float32)
    # As many as are found in memory: another number in each program.
    for step in range(tl.load(count + program)):
        product, is_larger = _combine(a, b)
        squared, _ = _combine(a, a)
        total += tl.where(is_larger, product * SCALE, squared) + step
    tl.store(out + columns, total, mask=is_in)
    tl.atomic_add(sums, tl.sum(tl.where(is_in, total, 0.0), 0))


@pytest.mark.parametrize("scale", [0.5, -2.0])
def test_repeated_operations_compute_anew(scale: float) -> None:
    for size in (70, 61):
        x, y, counts = torch.randn(size), torch.randn(size), torch.tensor([3, 0, 1, 5, 2])
        out, sums = torch.full((size,), math.nan), torch.zeros(1)
        _mixed_kernel[(5,)](out, x, y, counts, sums, size, 16, scale)
        steps = counts.repeat_interleave(16)[:size]
        term = torch.where((x > y) & (y < 2), (x * y + x) * scale, x * x + x)
        expected = steps * term + steps * (steps - 1) / 2
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(sums, expected.sum()[None])


@triton.jit
def _pair_kernel(out, x, y):
    offsets = tl.arange(0, 4)
    a, b = tl.load(x + offsets), tl.load(y + offsets)
    low, high = tl.split(tl.join(a - a, a - b))
    tl.store(out + offsets, low)
    tl.store(out + 4 + offsets, high)


def test_operands_may_be_the_same() -> None:
    x, y, out = torch.randn(4), torch.randn(4), torch.full((8,), math.nan)
    _pair_kernel[(1,)](out, x, y)
    assert torch.equal(out, torch.cat((torch.zeros(4), x - y)))


@triton.jit
def _widen_kernel(out, back, x, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(x + offsets).to(tl.float32)
    tl.store(out + offsets, wide)
    tl.store(back + offsets, wide.to(tl.bfloat16))


def test_every_bfloat16_number_is_widened_exactly() -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out, back = torch.full((1 << 16,), math.nan), torch.empty_like(x)
    _widen_kernel[(16,)](out, back, x, 1 << 12)
    assert torch.equal(out.view(torch.int32), x.view(torch.int16).int() << 16)
    assert torch.equal(back.view(torch.int16), x.view(torch.int16))


@triton.jit
def _shapes_kernel(out, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x_R = tl.load(x + row)
    total = tl.broadcast_to(x_R[None, :, None], (1, ROWS, 1)).sum()
    block = x_R[:, None] + tl.zeros((ROWS, COLUMNS), tl.float32) + total
    tl.store(out + row[:, None] * COLUMNS + column[None, :], block)


@pytest.mark.parametrize("columns", [2, 1024])
def test_blocks_of_any_size_are_repeated_along_new_axes(columns: int) -> None:
    x, out = torch.randn(8), torch.full((8, columns), math.nan)
    for _ in range(2):
        _shapes_kernel[(1,)](out, x, 8, columns)
        torch.testing.assert_close(out, (x + x.sum())[:, None].expand(8, columns))
        out.fill_(math.nan)
