"""Reads and writes the memory of worker processes, from threads of the engine's process.

Blocks and slots are those of the whole model: the workers, one for each rank, join or split them in memory that the
engine's process shares with them for the time of one copy (``device/stores/shared_copies.py``).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from mmap import mmap
from typing import Any

import numpy as np

from strandline.device.stores.arena_copies import Entries, Fence
from strandline.errors import EngineError
from strandline.specs import ModelSpec
from strandline.transfer.connection import Cause, TransferError
from strandline.transfer.nixl_mover import Region

Call = Callable[..., Sequence[Future[Any]]]
"""Calls a method of the executors of all ranks; returns, for each, what it will return or raise."""


class RankCopies:
    """What ``ArenaCopies`` are of memory in this process.

    Args:
        call: calls come after those before it, in each rank.
        spec: of the whole model.
    """

    def __init__(self, call: Call, spec: ModelSpec) -> None:
        self._call, self._spec = call, spec

    def fence(self) -> Fence:
        """Return None: every rank copies after what was launched when it gets the call."""
        return None

    @property
    def region(self) -> Region:
        """Refuse: the memory is not in this process."""
        raise EngineError("the memory of worker processes cannot be registered")

    def addresses(self, entries: Entries, fence: Fence) -> list[int]:
        """Refuse, as ``region``."""
        raise EngineError("blocks and slots of worker processes have no addresses")

    def read(self, entries: Entries, fence: Fence) -> memoryview:
        """Return the bytes of entries, one after the other; nothing may write them meanwhile.

        Raises:
            TransferError: a rank cannot read them.
        """
        with _shared(sum(entries.sizes(self._spec))) as (memory, path):
            self._copy("begin_read", path, entries)
            return memoryview(memory)

    def room(self, num_bytes: int) -> memoryview:
        """Return memory for that many bytes, whose contents are undefined."""
        return np.empty(num_bytes, np.uint8).data

    def write(self, entries: Entries, data: bytearray | memoryview, fence: Fence) -> None:
        """Write the bytes of entries, one after the other; nothing may read or write them meanwhile.

        They are written on all ranks when this returns, and no rank still writes them when it raises.

        Raises:
            TransferError: a rank cannot write them.
        """
        with _shared(sum(entries.sizes(self._spec))) as (memory, path):
            np.frombuffer(memory, np.uint8)[:] = np.frombuffer(data, np.uint8)  # other threads run meanwhile
            self._copy("begin_write", path, entries)

    def _copy(self, method: str, path: str, entries: Entries) -> None:
        """Wait until all ranks have copied, or cannot."""
        try:
            windows = tuple(map(tuple, entries.windows))
            futures = self._call(method, path, Entries(tuple(entries.blocks), tuple(entries.slots), windows))
        except EngineError as error:
            raise TransferError(Cause.NO_ROOM, str(error)) from error
        wait(futures)
        for rank, future in enumerate(futures):
            failure = future.exception()
            if failure is not None:
                raise TransferError(Cause.NO_ROOM, f"rank {rank} could not copy it: {failure}") from failure


@contextmanager
def _shared(num_bytes: int) -> Iterator[tuple[mmap, str]]:
    """Yield memory, and a path by which other processes open it. The memory stays valid here afterwards."""
    file = os.memfd_create("strandline hand-over")
    try:
        os.ftruncate(file, num_bytes)
        yield mmap(file, num_bytes), f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)
