"""Sizes of tiles and grids. Triton's own functions do the same, for kernels too, and take ten times as long."""

from typing import Final

from torch import Tensor

NUM_SMS: Final = 132
"""Multiprocessors of the H200, for which grids are shaped; other GPUs run the same grids."""

DIVISOR: Final = 16
"""Triton compiles a kernel by whether this divides its sizes and the addresses of its tensors: where it always does,
once."""


def cdiv(size: int, tile: int) -> int:
    """Return how many tiles cover a size."""
    return -(-size // tile)


def round_up(size: int, divisor: int) -> int:
    """Return the smallest multiple that is no smaller."""
    return cdiv(size, divisor) * divisor


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is no smaller."""
    return 1 << (size - 1).bit_length()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of all dimensions but the last, tensor by tensor, as kernels take them."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:-1])
