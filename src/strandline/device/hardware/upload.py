"""Copies of small arrays to the device and back, without waiting for it.

On a GPU everything passes through pinned memory; the caching allocator behind it keeps a buffer until its copy is done.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

ALIGN_ITEMS = 16
"""Integers that come together start on multiples of this, so that no kernel is compiled for another alignment."""

ALIGN_BYTES = 8 * ALIGN_ITEMS


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array's values on the device; on a CPU the tensor shares the array's memory."""
    return upload_together([values], device)[0]


def upload_together(values: Sequence[Sequence[int] | np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays on the device, by a single copy; integers that are in no array become int64."""
    arrays = [np.ascontiguousarray(x) if isinstance(x, np.ndarray) else np.array(x, dtype=np.int64) for x in values]
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = [0, *accumulate(-(-array.nbytes // ALIGN_BYTES) * ALIGN_BYTES for array in arrays)]
    # Allocated pinned and filled, not pinned afterwards: that would ask the driver about the address first.
    pinned = torch.empty(starts[-1] // 8, dtype=torch.int64, pin_memory=True)
    host = pinned.numpy().view(np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    together = pinned.to(device, non_blocking=True)
    return [_part(together, start // 8, array) for start, array in zip(starts, arrays, strict=False)]


def _part(together: Tensor, first: int, array: np.ndarray) -> Tensor:
    """Return the tensor of an array whose bytes begin at an item of int64."""
    part = together[first : first + -(-array.nbytes // 8)]
    if array.dtype != np.int64:
        part = part.view(torch.from_numpy(array).dtype)[: array.size]
    return part if array.ndim == 1 else part.view(array.shape)


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
            first_row: row of the table that takes the first one. Rows written to different tables never overlap.
        """
        num_rows, width = rows_NM.shape
        last_NM = self._last.get(first_row)
        if not num_rows or (last_NM is not None and np.array_equal(last_NM, rows_NM)):
            return
        self.table_NM[first_row : first_row + num_rows, :width].copy_(upload(rows_NM, self.table_NM.device))
        self._last[first_row] = rows_NM
