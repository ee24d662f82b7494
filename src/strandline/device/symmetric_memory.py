"""Memory of each GPU that the kernels of all ranks write to over NVLink, for sums of few rows (``rank_sums.py``).

Buffers are allocated, exchanged and tried at start. Where that fails on one rank, all ranks do without.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from strandline.kernels.binding import why_unavailable
from strandline.kernels.rank_sums import DTYPES, Connection, FewRowSums, buffer_shape
from strandline.kernels.ranks import Ranks

LOGGER: Final = logging.getLogger(__name__)

CHECKED_SHAPE: Final = (3, 1024)
"""Rows and channels of the sums that are tried."""

NUM_CHECKS: Final = 3
"""Sums that are tried in each dtype: each of the two parities occurs, and one of them again."""

CHECK_MAX_POLLS: Final = 1 << 20
"""How often a sum that is tried looks for another rank's rows, each time for about 1 µs."""

T = TypeVar("T")


class SymmetricMemory(Protocol):
    """Buffers that all ranks can write to."""

    device: torch.device

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Return a buffer of zeros, int64.

        Raises:
            ImportError, AttributeError, RuntimeError: this rank cannot allocate one, or cannot write to others'.
        """

    def exchange(self, buffer: Tensor) -> tuple[list[int], object]:
        """Return the addresses of all ranks' buffers on this rank's device, and what keeps them valid.

        All ranks call this.

        Raises:
            ImportError, AttributeError, RuntimeError: that failed.
        """


class TorchSymmetricMemory:
    """The symmetric memory of torch, on the GPUs of this machine.

    Args:
        device: this rank's own; its index is the rank, as ``engine/loading.py`` chooses it.
        num_ranks: these have the GPUs from 0 on.
    """

    def __init__(self, device: torch.device, num_ranks: int) -> None:
        self.device, self._num_ranks = device, num_ranks

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Return a buffer; see ``SymmetricMemory``."""
        from torch.distributed import _symmetric_memory

        if reason := why_unavailable("Triton", self.device.type):
            raise RuntimeError(reason)
        for peer in range(self._num_ranks):
            if peer != self.device.index and not torch.cuda.can_device_access_peer(self.device, peer):
                raise RuntimeError(f"{self.device} cannot access the memory of cuda:{peer}")
        buffer: Tensor = _symmetric_memory.empty(shape, dtype=torch.int64, device=self.device)
        return buffer.zero_()

    def exchange(self, buffer: Tensor) -> tuple[list[int], object]:
        """Return all ranks' buffers; see ``SymmetricMemory``."""
        from torch.distributed import _symmetric_memory

        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("torch.distributed has no process group")
        handle: Any = _symmetric_memory.rendezvous(buffer, group.group_name)
        views = [handle.get_buffer(rank, buffer.shape, buffer.dtype) for rank in range(self._num_ranks)]
        if views[handle.rank].data_ptr() != buffer.data_ptr():
            raise RuntimeError("this rank's buffer lies at another address than torch says")
        return [view.data_ptr() for view in views], (buffer, handle, views)


def connect_few_rows(ranks: Ranks, memory: SymmetricMemory) -> FewRowSums | None:
    """Return what sums few rows, or None on all ranks where that does not work on one of them.

    All ranks call this; the first one on which it fails logs why.
    """
    buffer = _on_all_ranks(ranks, lambda: memory.allocate(buffer_shape(ranks.size)))
    if buffer is None:
        return None

    def connect() -> FewRowSums:
        addresses, owned = memory.exchange(buffer)
        address_N = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        counter_R = torch.zeros(buffer.shape[2], dtype=torch.int32, device=memory.device)
        sums = FewRowSums(Connection(ranks.rank, address_N, counter_R, (buffer, owned)))
        # Compiles the kernels. No rank waits for another that takes longer over it.
        for dtype in DTYPES:
            sums.sum(torch.zeros(CHECKED_SHAPE, dtype=dtype, device=memory.device), max_polls=0)
        sums.gather(torch.zeros(1, 1, dtype=torch.int64, device=memory.device), max_polls=0)
        return sums

    sums = _on_all_ranks(ranks, connect)
    return None if sums is None else _on_all_ranks(ranks, lambda: _checked(sums, ranks, memory.device))


def _checked(sums: FewRowSums, ranks: Ranks, device: torch.device) -> FewRowSums:
    """Take some sums, and return ``sums``.

    Raises:
        RuntimeError: one is wrong.
    """
    wrong = dict[str, None]()
    for dtype in DTYPES:
        for factor in range(1, NUM_CHECKS + 1):
            message = torch.full(CHECKED_SHAPE, float(factor * (ranks.rank + 1)), dtype=dtype, device=device)
            wanted = factor * ranks.size * (ranks.size + 1) // 2
            if not bool((sums.sum(message, CHECK_MAX_POLLS) == wanted).all()):
                wrong[str(dtype)] = None
    if wrong:  # only after all sums, which the other ranks take, too
        raise RuntimeError(f"wrong sums in {' and '.join(wrong)}")
    return sums


def _on_all_ranks(ranks: Ranks, step: Callable[[], T]) -> T | None:
    """Return what a step returns on this rank; None if it fails on any."""
    result, reason = None, ""
    try:
        result = step()
    except (ImportError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
    first = ranks.least(ranks.rank if reason else ranks.size)
    if first == ranks.rank:
        LOGGER.warning("few rows are summed as many are: no symmetric memory on rank %d: %s", first, reason)
    return result if first == ranks.size else None
