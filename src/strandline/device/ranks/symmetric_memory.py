"""Memory of each GPU that the kernels of all ranks write to over NVLink, for sums.

Sums of few rows (``rank_sums.py``) and of many (``many_row_sums.py``) have buffers of their own. These are allocated,
exchanged and tried at start. Where that fails on one rank, all ranks do without.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from strandline.kernels.binding import why_unavailable
from strandline.kernels.collectives import many_row_sums, rank_sums
from strandline.kernels.collectives.connection import Connection
from strandline.kernels.collectives.many_row_sums import ManyRowSums
from strandline.kernels.collectives.rank_sums import DTYPES, FewRowSums
from strandline.kernels.ranks import Ranks

LOGGER: Final = logging.getLogger(__name__)

CHECKED_SHAPE: Final = (3, 1024)
"""Rows and channels of the sums of few rows that are tried."""

MANY_CHECKED_SHAPE: Final = (1031, 1024)
"""The same for many rows: some blocks of each rank, and a part of one."""

NUM_CHECKS: Final = 3
"""Sums that are tried in each dtype: each of the two parities occurs, and one of them again."""

CHECK_MAX_POLLS: Final = 1 << 20
"""How often a sum that is tried looks for another rank's rows, each time for about 1 µs."""

T = TypeVar("T")
Sums = TypeVar("Sums", FewRowSums, ManyRowSums)


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

    Source of the two calls: ``torch.distributed._symmetric_memory`` of torch 2.11 to 2.13. That module itself is not
    imported: it loads torch's compiler, which takes seconds in torch 2.11.

    Args:
        device: this rank's own; its index is the rank, as ``engine/loading.py`` chooses it.
        num_ranks: these have the GPUs from 0 on.
    """

    def __init__(self, device: torch.device, num_ranks: int) -> None:
        self.device, self._num_ranks = device, num_ranks

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Return a buffer; see ``SymmetricMemory``."""
        from torch._C._distributed_c10d import _SymmetricMemory

        if reason := why_unavailable("Triton", self.device.type):
            raise RuntimeError(reason)
        for peer in range(self._num_ranks):
            if peer != self.device.index and not torch.cuda.can_device_access_peer(self.device, peer):
                raise RuntimeError(f"{self.device} cannot access the memory of cuda:{peer}")
        strides = torch.empty(shape, device="meta").stride()
        return _SymmetricMemory.empty_strided_p2p(shape, strides, torch.int64, self.device).zero_()

    def exchange(self, buffer: Tensor) -> tuple[list[int], object]:
        """Return all ranks' buffers; see ``SymmetricMemory``."""
        from torch._C._distributed_c10d import _SymmetricMemory

        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("torch.distributed has no process group")
        handle: Any = _SymmetricMemory.rendezvous(buffer, group.group_name)
        views = [handle.get_buffer(rank, buffer.shape, buffer.dtype) for rank in range(self._num_ranks)]
        if views[handle.rank].data_ptr() != buffer.data_ptr():
            raise RuntimeError("this rank's buffer lies at another address than torch says")
        return [view.data_ptr() for view in views], (buffer, handle, views)


class SymmetricSums(NamedTuple):
    """Sums through symmetric memory; None: those of this kind do not work on one of the ranks."""

    few_rows: FewRowSums | None = None
    many_rows: ManyRowSums | None = None


def connect_sums(ranks: Ranks, memory: SymmetricMemory) -> SymmetricSums:
    """Return what sums few rows and what sums many, the same on all ranks.

    All ranks call this; the first one on which it fails logs why. Without sums of few rows there are none of many.
    """
    size, device = ranks.size, memory.device

    def connect_few(connection: Connection) -> FewRowSums:
        sums = FewRowSums(connection)
        _compile(sums, CHECKED_SHAPE, device)
        sums.gather(torch.zeros(1, 1, dtype=torch.int64, device=device), max_polls=0)
        return sums

    def connect_many(connection: Connection) -> ManyRowSums:
        sums = ManyRowSums(connection)
        _compile(sums, MANY_CHECKED_SHAPE, device)
        return sums

    shapes = rank_sums.buffer_shape(size), rank_sums.counter_shape(size)
    few = _connected(ranks, memory, "few rows", *shapes, connect_few, CHECKED_SHAPE)
    if few is None:
        return SymmetricSums()
    many_shapes = many_row_sums.buffer_shape(size), many_row_sums.counter_shape(size)
    many = _connected(ranks, memory, "many rows", *many_shapes, connect_many, MANY_CHECKED_SHAPE)
    return SymmetricSums(few, many)


def _connected(
    ranks: Ranks,
    memory: SymmetricMemory,
    kind: str,
    buffer_shape: tuple[int, ...],
    counter_shape: tuple[int, ...],
    create: Callable[[Connection], Sums],
    checked_shape: tuple[int, int],
) -> Sums | None:
    """Return sums that have been tried, or None on all ranks."""
    buffer = _on_all_ranks(ranks, kind, lambda: memory.allocate(buffer_shape))
    if buffer is None:
        return None

    def connect() -> Sums:
        addresses, owned = memory.exchange(buffer)
        address_N = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        counter = torch.zeros(counter_shape, dtype=torch.int32, device=memory.device)
        return create(Connection(ranks.rank, address_N, counter, (buffer, owned)))

    sums = _on_all_ranks(ranks, kind, connect)
    if sums is None:
        return None
    return _on_all_ranks(ranks, kind, lambda: _checked(sums, ranks, checked_shape, memory.device))


def _compile(sums: FewRowSums | ManyRowSums, shape: tuple[int, int], device: torch.device) -> None:
    """Compile the kernels of sums. No rank waits for another that takes longer over it."""
    for dtype in DTYPES:
        sums.sum(torch.zeros(shape, dtype=dtype, device=device), max_polls=0)


def _checked(sums: Sums, ranks: Ranks, shape: tuple[int, int], device: torch.device) -> Sums:
    """Take some sums, and return ``sums``.

    Raises:
        RuntimeError: one is wrong.
    """
    wrong = dict[str, None]()
    # All messages are exact in bfloat16, and blocks of 16 KiB near each other differ.
    index = torch.arange(shape[0] * shape[1], device=device).view(shape) % 61
    for dtype in DTYPES:
        for summand in range(1, NUM_CHECKS + 1):
            message = (index + ranks.rank + summand).to(dtype)
            wanted = (ranks.size * (index + summand) + ranks.size * (ranks.size - 1) // 2).to(dtype)
            if not torch.equal(sums.sum(message, CHECK_MAX_POLLS), wanted):
                wrong[str(dtype)] = None
    if wrong:  # only after all sums, which the other ranks take, too
        raise RuntimeError(f"wrong sums in {' and '.join(wrong)}")
    return sums


def _on_all_ranks(ranks: Ranks, kind: str, step: Callable[[], T]) -> T | None:
    """Return what a step returns on this rank; None if it fails on any."""
    result, reason = None, ""
    try:
        result = step()
    except (ImportError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
    first = ranks.least(ranks.rank if reason else ranks.size)
    if first == ranks.rank:
        LOGGER.warning("%s are not summed in symmetric memory: it fails on rank %d: %s", kind, first, reason)
    return result if first == ranks.size else None
