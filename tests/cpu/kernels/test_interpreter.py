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
