"""Copies of small arrays to the device and back, without waiting for it.

On a GPU everything passes through pinned memory; the caching allocator behind it keeps a buffer until its copy is done.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

ALIGN_ITEMS = 16
"""Arrays that are uploaded together start on multiples of this, so that no kernel is compiled for another alignment."""


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array's values on the device; on a CPU the tensor shares the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor
    # Allocated pinned and filled, not pinned afterwards: that would ask the driver about the address first.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


def upload_together(columns: Sequence[Sequence[int] | np.ndarray], device: torch.device) -> list[Tensor]:
    """Return columns of integers on the device as int64, by a single copy, and arrays of float64 as such."""
    arrays = [np.asarray(column, dtype=None if _is_float(column) else np.int64) for column in columns]
    if not any(map(len, arrays)):
        return [torch.empty(0, dtype=torch.int64, device=device)] * len(arrays)
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    lengths = [-(-len(array) // ALIGN_ITEMS) * ALIGN_ITEMS for array in arrays]
    starts = [0, *accumulate(lengths)]
    pinned = torch.empty(starts[-1], dtype=torch.int64, pin_memory=True)
    host = pinned.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + len(array)] = array.view(np.int64)
    together = pinned.to(device, non_blocking=True)
    parts = [together[start : start + len(array)] for start, array in zip(starts, arrays, strict=False)]
    return [
        part.view(torch.float64) if _is_float(column) else part for part, column in zip(parts, columns, strict=True)
    ]


def _is_float(column: Sequence[int] | np.ndarray) -> bool:
    return isinstance(column, np.ndarray) and column.dtype == np.float64


def download(tensor: Tensor) -> Tensor:
    """Begin to copy a tensor to the host; what comes back is filled once the device has got there."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)


class UploadedTable:
    """A zeroed table on the device, which takes the rows of one step after another.

    Nothing is copied where they are those of the step before: block tables change once in as many steps as a block has
    tokens.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.table_NM = torch.zeros(shape, dtype=torch.int32, device=device)
        self._last: dict[int, np.ndarray] = {}

    def write(self, rows_NM: np.ndarray, first_row: int = 0) -> None:
        """Bring rows into the table, from the first column on; the rest stays. They must not change.

        Args:
            first_row: of the table's, that takes the first one. Rows that are written to different ones never overlap.
        """
        num_rows, width = rows_NM.shape
        last_NM = self._last.get(first_row)
        if not num_rows or (last_NM is not None and np.array_equal(last_NM, rows_NM)):
            return
        self.table_NM[first_row : first_row + num_rows, :width].copy_(upload(rows_NM, self.table_NM.device))
        self._last[first_row] = rows_NM
