"""Sums over ranks, and sums with the norm that follows: through one kernel where there is one, else one by one.

Where the devices of all ranks can write to each other's memory, a kernel (``rank_sums_triton.py``) sums few rows
faster than the backend of ``Ranks.sum`` does, and adds the residual stream and normalises in the same launch. Which way
a tensor takes follows from its shape and dtype alone, so that it is the same on all ranks. Another kernel does the
same with many rows (``many_row_sums.py``).

Shape suffixes: T rows, E channels, W words of a row, N ranks, R rows that the buffers hold.
"""

from collections.abc import Callable
from importlib import import_module
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from strandline.kernels.binding import Kernels
from strandline.kernels.collectives.connection import Connection, Norm
from strandline.kernels.expert_choices import Summand, added_up, like, without_factors
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.norm import add_rms_norm, add_rms_norm_zero_centered

MAX_ROW_BYTES: Final = 16 << 10
"""The size of a row that buffers have room for: 8,192 channels in bfloat16."""

MAX_SENT_ROWS: Final = 512
"""Rows that one rank may receive: 256 from each of 2 ranks, its own counted."""

MAX_SENT_BYTES: Final = 2 << 20
"""Bytes that one rank may receive: messages of 1 MiB with 2 ranks. Larger ones are left to ``Ranks.sum``: flags double
what goes over NVLink, so that bandwidth counts sooner."""

WORD_BYTES: Final = 4
"""A row consists of whole words, each sent with a flag of the same size."""

DTYPES: Final = (torch.bfloat16, torch.float32)

IS_ZERO_CENTERED: Final = {add_rms_norm: False, add_rms_norm_zero_centered: True}
"""The operations that one kernel does together with the sum before them."""

AddNorm = Callable[[Summand, Tensor, Tensor, float], tuple[Any, Tensor]]
"""Adds a summand to the residual stream and normalises it, given a weight and ``eps``; also returns the new stream."""


def buffer_shape(num_ranks: int) -> tuple[int, int, int, int]:
    """Return the shape of the buffer that each rank has, int64: parities of epochs, senders, rows, words."""
    return 2, num_ranks, MAX_SENT_ROWS // num_ranks, MAX_ROW_BYTES // WORD_BYTES


def counter_shape(num_ranks: int) -> tuple[int]:
    """Return the shape of a rank's counters, int32: one for each row."""
    return (buffer_shape(num_ranks)[2],)


class FewRowSums:
    """Sums of few rows, taken by one kernel on each rank.

    All ranks call the same functions in the same order, with tensors of the same shapes, on one stream or on streams
    that wait for each other. Calls can be captured in CUDA graphs.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._kernels: Any = import_module("strandline.kernels.collectives.rank_sums_triton")
        num_ranks = len(connection.address_N)
        self._max_bytes = MAX_SENT_BYTES // num_ranks
        _, _, self._max_rows, self._max_words = buffer_shape(num_ranks)

    def can_sum(self, x: Tensor) -> bool:
        """Return whether the kernel takes a tensor of this shape and dtype."""
        if x.dtype not in DTYPES or not 0 < x.nbytes <= self._max_bytes:
            return False
        row_bytes = x.shape[-1] * x.itemsize if x.dim() else x.itemsize
        return row_bytes % WORD_BYTES == 0 and row_bytes <= MAX_ROW_BYTES and prod(x.shape[:-1]) <= self._max_rows

    def sum(self, x: Tensor, max_polls: int = -1) -> Tensor:
        """Return the sum of all ranks' tensors, dense; ``x`` may be overwritten.

        Args:
            x: ``can_sum`` it.
            max_polls: how often to look for another rank's rows before the result is wrong instead of late; negative:
                no limit.
        """
        x = _in_words(x)
        rows_TE = x.view(-1, x.shape[-1] if x.dim() else 1)
        self._kernels.sum_rows(rows_TE, self._connection, self._max_words, max_polls)
        return x

    def can_gather(self, x: Tensor) -> bool:
        """Return whether the kernel takes a matrix of this shape and dtype."""
        row_bytes = x.shape[-1] * x.itemsize
        is_size_right = 0 < x.nbytes <= self._max_bytes and len(x) <= self._max_rows
        return is_size_right and row_bytes % WORD_BYTES == 0 and row_bytes <= MAX_ROW_BYTES

    def gather(self, x: Tensor, max_polls: int = -1) -> Tensor:
        """Return all ranks' matrices side by side.

        Args:
            x: ``can_gather`` it.
            max_polls: as for ``sum``.
        """
        words_TW = _in_words(x).view(torch.int32)
        gathered = self._kernels.gather_rows(words_TW, self._connection, self._max_words, max_polls)
        joined: Tensor = gathered.view(x.dtype)
        return joined

    def add_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, *, is_zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        """Sum over all ranks, round, then do as ``add_rms_norm`` or ``add_rms_norm_zero_centered``.

        Args:
            x_TE: ``can_sum`` it; may be overwritten.
            residual_TE: residual stream of the same dtype.
        """
        x_TE, residual_TE = _in_words(x_TE), _in_words(residual_TE)
        norm = Norm(residual_TE, torch.empty_like(x_TE), weight_E, eps, is_zero_centered)
        self._kernels.sum_add_norm_rows(x_TE, norm, self._connection, self._max_words)
        return norm.normed_TE, x_TE


def bind_sum_add_norm(kernels: Kernels, add_norm: Operation[..., Any]) -> AddNorm:
    """Return a function that sums its first argument over all ranks, and then does as the operation.

    With one rank, the operation itself. Deterministic engines sum and normalise one by one: the kernels for few and for
    many rows may add squares in another order.
    """
    ranks = kernels.ranks
    separate: AddNorm = kernels[add_norm]
    if ranks.size == 1:
        return separate
    few, many, is_zero_centered = ranks.few_rows, ranks.many_rows, IS_ZERO_CENTERED.get(add_norm)

    def sum_then_norm(x_TE: Summand, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Any, Tensor]:
        return separate(ranks.sum(x_TE), residual_TE, weight_E, eps)

    if few is None or is_zero_centered is None or kernels.workload.is_deterministic:
        return sum_then_norm

    def sum_add_norm(x_TE: Summand, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Any, Tensor]:
        x_TE = without_factors(x_TE)
        sum_TE = like(x_TE)
        if residual_TE.dtype != sum_TE.dtype:
            return sum_then_norm(x_TE, residual_TE, weight_E, eps)
        if few.can_sum(sum_TE):
            return few.add_norm(added_up(x_TE), residual_TE, weight_E, eps, is_zero_centered=is_zero_centered)
        if many is not None and many.can_add_norm(sum_TE):
            return many.add_norm(x_TE, residual_TE, weight_E, eps, is_zero_centered=is_zero_centered)
        return sum_then_norm(x_TE, residual_TE, weight_E, eps)

    return sum_add_norm


def _in_words(x: Tensor) -> Tensor:
    """Return a tensor as the kernel takes it: dense, at a multiple of a word."""
    return x if x.is_contiguous() and x.data_ptr() % WORD_BYTES == 0 else x.clone(memory_format=torch.contiguous_format)
