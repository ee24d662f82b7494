"""Sums over ranks of many rows, taken by one kernel on each rank's device (``many_row_sums_triton.py``).

Few rows are summed faster by ``rank_sums.py``. Tensors that do not fit in the buffers are summed in parts of one size.

Shape suffixes: T rows, E channels, N ranks, B blocks.
"""

from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from strandline.kernels.rank_sums import DTYPES, Connection
from strandline.kernels.sizes import cdiv, next_power_of_2

MAX_SUM_BYTES: Final = 36 << 20
"""What a launch sums at most: 8,192 rows of prompts beside 1,024 decodes, of 2,048 channels in bfloat16."""

BLOCK_BYTES: Final = 16 << 10
"""What one program of the kernel moves: enough for all threads, and as little as lets a message overlap with itself."""

FLAG_BYTES: Final = 4


def num_blocks(num_ranks: int) -> int:
    """Return the number of blocks that a launch sums at most; each rank has as many."""
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
    """Sums taken by one kernel on each rank.

    All ranks call it in the same order, with tensors of the same shapes, on one stream or on streams that wait for each
    other. Calls can be captured in CUDA graphs.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._kernels: Any = import_module("strandline.kernels.many_row_sums_triton")
        self._max_blocks = connection.counter.shape[1]

    def can_sum(self, x: Tensor) -> bool:
        """Return whether the kernel takes a tensor of this shape and dtype."""
        return x.dtype in DTYPES and x.numel() > 0

    def sum(self, x: Tensor, max_polls: int = -1) -> Tensor:
        """Return the sum of all ranks' tensors, dense; ``x`` may be overwritten.

        Args:
            x: ``can_sum`` it.
            max_polls: how often a program looks for what another rank stores before the result is wrong instead of
                late; negative: no limit.
        """
        x, its = x.contiguous(), self._connection
        for part in x.view(-1).split(self._part_size(x.numel(), BLOCK_BYTES // x.itemsize)):
            self._kernels.sum_elements(part, its.address_N, its.counter, its.rank, BLOCK_BYTES, max_polls)
        return x

    def can_add_norm(self, x_TE: Tensor) -> bool:
        """Return whether the kernel also takes the norm of rows of this shape and dtype."""
        return self.can_sum(x_TE) and _block_rows(x_TE.shape[1], x_TE.itemsize) > 0

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
        x_TE, residual_TE, its = x_TE.contiguous(), residual_TE.contiguous(), self._connection
        normed_TE = torch.empty_like(x_TE)
        num_rows, size = x_TE.shape
        block_rows = _block_rows(size, x_TE.itemsize)
        part_rows = self._part_size(num_rows, block_rows)
        for parts in zip(*(rows_TE.split(part_rows) for rows_TE in (x_TE, residual_TE, normed_TE)), strict=True):
            self._kernels.sum_add_norm_rows(
                *parts,
                weight_E,
                eps,
                its.address_N,
                its.counter,
                its.rank,
                BLOCK_BYTES,
                block_rows,
                max_polls,
                is_zero_centered=is_zero_centered,
            )
        return normed_TE, x_TE

    def _part_size(self, num_items: int, block_items: int) -> int:
        """Return how many items, which come in blocks, each launch takes; all but the last take as many."""
        blocks = cdiv(num_items, block_items)
        return cdiv(blocks, cdiv(blocks, self._max_blocks)) * block_items


def _block_rows(size: int, element_bytes: int) -> int:
    """Return how many whole rows a program takes, which are as wide as a power of 2 to it; 0: none has room."""
    return BLOCK_BYTES // (next_power_of_2(size) * element_bytes)
