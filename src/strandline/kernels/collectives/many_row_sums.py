"""Sums over ranks of many rows, taken by one kernel on each rank's device (``many_row_sums_triton.py``).

Few rows are summed faster by ``rank_sums.py``. Tensors that do not fit in the buffers are summed in parts of one size.

Shape suffixes: T rows, E channels, N ranks, B blocks.
"""

from importlib import import_module
from itertools import repeat
from typing import Any, Final

import torch
from torch import Tensor

from strandline.kernels.collectives.connection import Connection, Norm
from strandline.kernels.collectives.rank_sums import DTYPES
from strandline.kernels.expert_choices import ExpertChoices, Part
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
    num_entries = 2 * (num_ranks - 1) * num_blocks(num_ranks) // num_ranks
    return (cdiv(num_entries * (BLOCK_BYTES + FLAG_BYTES), 8),)


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
        self._kernels: Any = import_module("strandline.kernels.collectives.many_row_sums_triton")
        self._max_blocks = connection.counter.shape[1]

    def can_sum(self, x: Part) -> bool:
        """Return whether the kernel takes a tensor of this shape and dtype, or such choices."""
        if isinstance(x, ExpertChoices):
            return self.can_add_norm(x.like_sum)
        return x.dtype in DTYPES and x.numel() > 0

    def sum(self, x: Part, max_polls: int = -1) -> Tensor:
        """Return the sum of all ranks' tensors or choices, dense; a tensor may be overwritten.

        Args:
            x: ``can_sum`` it.
            max_polls: how often a program looks for what another rank stores before the result is wrong instead of
                late; negative: no limit.
        """
        if isinstance(x, ExpertChoices):
            sum_TE = torch.empty_like(x.like_sum)
            num_rows, size = sum_TE.shape
            block_rows = _block_rows(size, sum_TE.itemsize)
            part_rows = self._part_size(num_rows, block_rows)
            for choices, part_TE in zip(x.split(part_rows), sum_TE.split(part_rows), strict=True):
                self._kernels.sum_choices(choices, part_TE, self._connection, BLOCK_BYTES, block_rows, max_polls)
            return sum_TE
        x = x.contiguous()
        for part in x.view(-1).split(self._part_size(x.numel(), BLOCK_BYTES // x.itemsize)):
            self._kernels.sum_elements(part, self._connection, BLOCK_BYTES, max_polls)
        return x

    def can_add_norm(self, x_TE: Tensor) -> bool:
        """Return whether the kernel also takes the norm of rows of this shape and dtype."""
        return self.can_sum(x_TE) and _block_rows(x_TE.shape[1], x_TE.itemsize) > 0

    def add_norm(
        self,
        x_TE: Part,
        residual_TE: Tensor,
        weight_E: Tensor,
        eps: float,
        max_polls: int = -1,
        *,
        is_zero_centered: bool,
    ) -> tuple[Tensor, Tensor]:
        """Sum over all ranks, round, then do as ``add_rms_norm`` or ``add_rms_norm_zero_centered``.

        Args:
            x_TE: ``can_add_norm`` it, or what is like it; a tensor may be overwritten.
            residual_TE: residual stream of the same dtype.
            max_polls: as for ``sum``.
        """
        residual_TE = residual_TE.contiguous()
        sum_TE = x_TE.contiguous() if isinstance(x_TE, Tensor) else torch.empty_like(x_TE.like_sum)
        normed_TE = torch.empty_like(sum_TE)
        num_rows, size = sum_TE.shape
        block_rows = _block_rows(size, sum_TE.itemsize)
        part_rows = self._part_size(num_rows, block_rows)
        rows = [rows_TE.split(part_rows) for rows_TE in (sum_TE, residual_TE, normed_TE)]
        choices = repeat(None, len(rows[0])) if isinstance(x_TE, Tensor) else x_TE.split(part_rows)
        for part_TE, residual_part_TE, normed_part_TE, part in zip(*rows, choices, strict=True):
            norm = Norm(residual_part_TE, normed_part_TE, weight_E, eps, is_zero_centered)
            self._kernels.sum_add_norm_rows(part_TE, norm, self._connection, BLOCK_BYTES, block_rows, max_polls, part)
        return normed_TE, sum_TE

    def _part_size(self, num_items: int, block_items: int) -> int:
        """Return how many items, which come in blocks, each launch takes; all but the last take as many."""
        blocks = cdiv(num_items, block_items)
        return cdiv(blocks, cdiv(blocks, self._max_blocks)) * block_items


def _block_rows(size: int, element_bytes: int) -> int:
    """Return how many whole rows a program takes, which are as wide as a power of 2 to it; 0: none has room."""
    return BLOCK_BYTES // (next_power_of_2(size) * element_bytes)
