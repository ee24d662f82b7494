"""Copies between the arena and the host, in other threads than the one that launches steps.

On a GPU they run on a separate stream, after all work launched before a given *fence*.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from strandline.device.stores.arena_snapshots import ArenaSnapshots, Windows
from strandline.device.stores.snapshot_encoding import AS_IS, Encoding
from strandline.ids import PATH, Lifetime, SlotId
from strandline.kernels.arena import ArenaTensors
from strandline.specs import ModelSpec
from strandline.transfer.nixl_mover import Region

Fence = torch.cuda.Event | None
"""A point in the order of launched work; None on a CPU, where launched work is already done."""


class Entries(NamedTuple):
    """What is copied together: blocks, then slots, then window blocks of each size."""

    blocks: Sequence[int] = ()
    slots: Sequence[int] = ()
    windows: Sequence[Sequence[int]] = ()

    @property
    def kinds(self) -> tuple[Sequence[int], ...]:
        """The ids of each kind. The last sizes of windows may be left out."""
        return self.blocks, self.slots, *self.windows

    def sizes(self, spec: ModelSpec) -> tuple[int, ...]:
        """Return the bytes of each kind."""
        each = (spec.raw_block_bytes, spec.raw_slot_bytes, *(window.block_bytes for window in spec.window_sizes))
        return tuple(len(ids) * num_bytes for ids, num_bytes in zip(self.kinds, each, strict=False))


def of_lifetime(lifetime: Lifetime, blocks: Sequence[int]) -> Sequence[Sequence[int]]:
    """Return window blocks of one size as ``Entries`` has them; none of the lifetime of paths."""
    return [*[()] * (lifetime - 1), blocks] if lifetime != PATH else ()


class Copies(Protocol):
    """Reads and writes entries in the layout of one rank's model, one after the other."""

    @property
    def region(self) -> Region:
        """The memory in which all of them lie, if it is in this process."""

    def fence(self) -> Fence:
        """Return the present point in the order of what was launched. In the thread that launches."""

    def addresses(self, entries: Entries, fence: Fence) -> list[int]:
        """Return where entries begin, once what was launched before the fence is done."""

    def read(self, entries: Entries, fence: Fence) -> memoryview:
        """Return the bytes as what was launched before the fence left them. Nothing may write them meanwhile."""

    def room(self, num_bytes: int) -> memoryview:
        """Return memory for that many bytes, whose contents are undefined, which is written from fastest."""

    def write(self, entries: Entries, data: bytearray | memoryview, fence: Fence) -> None:
        """Write the bytes, after what was launched before the fence.

        Nothing may read or write them meanwhile. They are written when this returns.
        """


class ArenaCopies:
    """Reads and writes whole blocks and slots.

    Args:
        slots: encodes the slots of snapshots as they are stored.
    """

    def __init__(self, arena: ArenaTensors, slots: Encoding = AS_IS) -> None:
        self.snapshots = ArenaSnapshots(arena, slots)
        self._bytes = arena.bytes
        self._rows = tuple(_rows(arena))
        """The arena as blocks, as slots and as window blocks."""
        self._device = arena.bytes.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def enter_thread(self) -> None:
        """Prepare a thread that reads or writes: a rank whose device is not the first one takes no memory of that."""
        if self._stream is not None:
            torch.cuda.set_device(self._device)

    def fence(self) -> Fence:
        """Return the present point in the order of what was launched. In the thread that launches."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @property
    def region(self) -> Region:
        """Return the memory in which all blocks and slots lie."""
        data = self._bytes
        return Region(data.data_ptr(), data.numel(), data.get_device() if self._stream is not None else None)

    def addresses(self, entries: Entries, fence: Fence) -> list[int]:
        """Return where entries begin, once what was launched before the fence is done."""
        if fence is not None:
            fence.synchronize()
        base = self._bytes.data_ptr()
        return [base + index * rows.stride(0) for rows, ids in self._pairs(entries) for index in ids]

    def _pairs(self, entries: Entries) -> "zip[tuple[Tensor, Sequence[int]]]":
        """Return the rows of each kind and the ids of entries."""
        return zip(self._rows, entries.kinds, strict=False)

    def read(self, entries: Entries, fence: Fence) -> memoryview:
        """Return the bytes of entries, one after the other, as what was launched before the fence left them.

        Nothing may write them meanwhile.
        """
        if self._stream is None:
            parts = [rows.numpy()[list(ids)].reshape(-1) for rows, ids in self._pairs(entries) if ids]
            return (np.concatenate(parts) if len(parts) > 1 else parts[0]).data
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            parts_X = [rows[list(ids)].view(-1) for rows, ids in self._pairs(entries) if ids]
            device_X = torch.cat(parts_X)
            host_X = torch.empty(len(device_X), dtype=torch.uint8, pin_memory=True)
            host_X.copy_(device_X, non_blocking=True)
            self._stream.synchronize()
        return host_X.numpy().data

    def read_snapshot(self, slot: SlotId, windows: Windows, fence: Fence) -> memoryview:
        """Return the stored bytes of a snapshot, as what was launched before the fence left it.

        Nothing may write it meanwhile.
        """
        with torch.inference_mode():
            if self._stream is None:
                return self.snapshots.encode(slot, windows).numpy().data
            with torch.cuda.stream(self._stream):
                if fence is not None:
                    self._stream.wait_event(fence)
                rest_X = self.snapshots.encode(slot, windows)
                host_X = torch.empty(len(rest_X), dtype=torch.uint8, pin_memory=True)
                host_X.copy_(rest_X, non_blocking=True)
                self._stream.synchronize()
        return host_X.numpy().data

    def room(self, num_bytes: int) -> memoryview:
        """Return memory for that many bytes, whose contents are undefined; pinned on a GPU."""
        if self._stream is None:
            return np.empty(num_bytes, np.uint8).data
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data

    def write(self, entries: Entries, data: bytearray | memoryview, fence: Fence) -> None:
        """Write the bytes of entries, one after the other, after what was launched before the fence.

        Nothing may read or write them meanwhile. They are written when this returns.
        """
        if self._stream is None:
            self._write(entries, torch.frombuffer(data, dtype=torch.uint8))
            return
        host_X = torch.frombuffer(data, dtype=torch.uint8)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            # Memory that is pinned already, as that of ``room``, is not copied.
            self._write(entries, host_X.pin_memory().to(self._device, non_blocking=True))
            self._stream.synchronize()

    def _write(self, entries: Entries, data_X: Tensor) -> None:
        """Write bytes that are on the arena's device."""
        start = 0
        for rows, ids in self._pairs(entries):
            if ids:
                end = start + len(ids) * rows.shape[1]
                rows[list(ids)] = data_X[start:end].view(len(ids), -1)
                start = end

    def write_snapshot(self, slot: SlotId, windows: Windows, data: memoryview, fence: Fence) -> None:
        """Write a snapshot from its stored bytes, after what was launched before the fence.

        Nothing may read or write it meanwhile. It is written when this returns.
        """
        host_X = torch.frombuffer(data, dtype=torch.uint8)
        with torch.inference_mode():
            if self._stream is None:
                self.snapshots.decode(slot, windows, [host_X])
                return
            with torch.cuda.stream(self._stream):
                if fence is not None:
                    self._stream.wait_event(fence)
                self.snapshots.decode(slot, windows, [host_X.pin_memory()])
                self._stream.synchronize()


def _rows(arena: ArenaTensors) -> Iterator[Tensor]:
    """Yield the arena's bytes as blocks, as slots and as window blocks of each size, one a row."""
    spec = arena.spec
    yield arena.bytes.view(arena.num_blocks, spec.block_bytes)
    yield arena.bytes.view(arena.num_slabs, spec.slab_bytes)[:, : spec.raw_slot_bytes]
    for window, stride_bytes in zip(spec.window_sizes, spec.window_strides_bytes, strict=True):
        yield arena.bytes.view(-1, stride_bytes)[:, : window.block_bytes]
