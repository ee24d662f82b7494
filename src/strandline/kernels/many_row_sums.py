"""Sums over ranks of up to 32 MiB, taken by one kernel on each rank's device (``many_row_sums_triton.py``).

Few rows are summed faster by ``rank_sums.py``, and larger tensors are left to the backend of ``Ranks.sum``.

Shape suffixes: T rows, E channels, N ranks, B blocks.
"""

from importlib import import_module
from typing import Any, Final

from torch import Tensor

from strandline.kernels.rank_sums import DTYPES, Connection
from strandline.kernels.sizes import cdiv, next_power_of_2

MAX_SUM_BYTES: Final = 32 << 20
"""The size of a message: 8,192 rows of 2,048 channels in bfloat16."""

BLOCK_BYTES: Final = 16 << 10
"""What one program of the kernel moves: enough for all threads, and as little as lets a message overlap with itself."""

FLAG_BYTES: Final = 4


def num_blocks(num_ranks: int) -> int:
    """Return the number of blocks of the largest message; each rank has as many."""
    return cdiv(MAX_SUM_BYTES // BLOCK_BYTES, num_ranks) * num_ranks


def buffer_shape(num_ranks: int) -> tuple[int]:
    """Return the shape of the buffer that each rank has, int64: blocks and their flags.

    A rank receives a part of each of its blocks, and the sum of each block of others, from every other rank.
    """
    num_places = 2 * (num_ranks - 1) * num_blocks(num_ranks) // num_ranks
    return (cdiv(num_places * (BLOCK_BYTES + FLAG_BYTES), 8),)


def counter_shape(num_ranks: int) -> tuple[int, int]:
    """Return the shape of a rank's counters, int32: two for each block."""
    return 2, num_blocks(num_ranks)


class ManyRowSums:
    """Sums taken by one kernel on each rank, of tensors that fit in its buffers.

    All ranks call it in the same order, with tensors of the same shapes, on one stream or on streams that wait for each
    other. Calls can be captured in CUDA graphs.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._kernels: Any = import_module("strandline.kernels.many_row_sums_triton")
        self._max_blocks = num_blocks(len(connection.address_N))

    def can_sum(self, x: Tensor) -> bool:
        """Return whether the kernel takes a tensor of this shape and dtype."""
        return x.dtype in DTYPES and 0 < x.nbytes <= MAX_SUM_BYTES

    def sum(self, x: Tensor, max_polls: int = -1) -> Tensor:
        """Return the sum of all ranks' tensors, dense; ``x`` may be overwritten.

        Args:
            x: ``can_sum`` it.
            max_polls: how often a program looks for what another rank stores before the result is wrong instead of
                late; negative: no limit.
        """
        x, its = x.contiguous(), self._connection
        self._kernels.sum_elements(x.view(-1), its.address_N, its.counter, its.rank, BLOCK_BYTES, max_polls)
        return x

    def can_add_norm(self, x_TE: Tensor) -> bool:
        """Return whether the kernel also takes the norm of rows of this shape and dtype."""
        num_rows, size = x_TE.shape
        if not self.can_sum(x_TE) or _block_rows(size, x_TE.itemsize) == 0:
            return False
        return num_rows <= self._max_blocks * _block_rows(size, x_TE.itemsize)

    def add_norm(
        self,
        x_TE: Tensor,
        residual_TE: Tensor,
        weight_E: Tensor,
        eps: float,
        max_polls: int = -1,
        *,
        is_zero_centered: bool,
    ) -> tuple[Tensor, Tensor]:
        """Sum over all ranks, round, then do as ``add_rms_norm`` or ``add_rms_norm_zero_centered``.

        Args:
            x_TE: ``can_add_norm`` it; may be overwritten.
            residual_TE: of the same dtype.
            max_polls: as for ``sum``.
        """
        x_TE, its = x_TE.contiguous(), self._connection
        normed_TE = self._kernels.sum_add_norm_rows(
            x_TE,
            residual_TE.contiguous(),
            weight_E,
            eps,
            its.address_N,
            its.counter,
            its.rank,
            BLOCK_BYTES,
            _block_rows(x_TE.shape[1], x_TE.itemsize),
            max_polls,
            is_zero_centered=is_zero_centered,
        )
        return normed_TE, x_TE


def _block_rows(size: int, element_bytes: int) -> int:
    """Return how many whole rows a program takes, which are as wide as a power of 2 to it; 0: none has room."""
    return BLOCK_BYTES // (next_power_of_2(size) * element_bytes)
