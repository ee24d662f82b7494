"""Copies between the arena and the host, in other threads than the one that launches steps.

On a GPU they run on a separate stream, after all work launched before a given *fence*.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from strandline.device.stores.arena_snapshots import ArenaSnapshots
from strandline.device.stores.snapshot_encoding import AS_IS, Encoding
from strandline.ids import BlockId, SlotId
from strandline.kernels.arena import ArenaTensors
from strandline.transfer.nixl_mover import Region

Fence = torch.cuda.Event | None
"""A point in the order of launched work; None on a CPU, where launched work is already done."""


class Copies(Protocol):
    """Reads and writes blocks and slots in the layout of one rank's model, one after the other."""

    @property
    def region(self) -> Region:
        """The memory in which all of them lie, if it is in this process."""

    def fence(self) -> Fence:
        """Return the present point in the order of what was launched. In the thread that launches."""

    def addresses(self, blocks: Sequence[int], slots: Sequence[int], fence: Fence) -> list[int]:
        """Return where blocks and slots begin, once what was launched before the fence is done."""

    def read(self, blocks: Sequence[int], slots: Sequence[int], fence: Fence) -> memoryview:
        """Return the bytes as what was launched before the fence left them. Nothing may write them meanwhile."""

    def room(self, num_bytes: int) -> memoryview:
        """Return memory for that many bytes, whose contents are undefined, which is written from fastest."""

    def write(self, blocks: Sequence[int], slots: Sequence[int], data: bytearray | memoryview, fence: Fence) -> None:
        """Write the bytes, after what was launched before the fence.

        Nothing may read or write them meanwhile. They are written when this returns.
        """


class ArenaCopies:
    """Reads and writes whole blocks and slots.

    Args:
        slots: encodes the slots of snapshots as they are stored.
    """

    def __init__(self, arena: ArenaTensors, slots: Encoding = AS_IS) -> None:
        spec = arena.spec
        self.snapshots = ArenaSnapshots(arena, slots)
        self._block_BX = arena.bytes.view(arena.num_blocks, spec.block_bytes)
        self._slot_SX = arena.bytes.view(arena.num_slabs, spec.slab_bytes)[:, : spec.raw_slot_bytes]
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
        data = self._block_BX
        return Region(data.data_ptr(), data.numel(), data.get_device() if self._stream is not None else None)

    def addresses(self, blocks: Sequence[int], slots: Sequence[int], fence: Fence) -> list[int]:
        """Return where blocks and slots begin, once what was launched before the fence is done."""
        if fence is not None:
            fence.synchronize()
        base, block_bytes, slab_bytes = self._block_BX.data_ptr(), self._block_BX.stride(0), self._slot_SX.stride(0)
        return [*(base + block * block_bytes for block in blocks), *(base + slot * slab_bytes for slot in slots)]

    def read(self, blocks: Sequence[int], slots: Sequence[int], fence: Fence) -> memoryview:
        """Return the bytes of blocks and slots, one after the other, as what was launched before the fence left them.

        Nothing may write them meanwhile.
        """
        if self._stream is None:
            block_BX, slot_SX = self._block_BX.numpy(), self._slot_SX.numpy()
            parts = [block_BX[list(blocks)].reshape(-1), slot_SX[list(slots)].reshape(-1)]
            return (np.concatenate(parts) if blocks and slots else parts[not blocks]).data
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            parts_X = [self._block_BX[list(blocks)].view(-1), self._slot_SX[list(slots)].reshape(-1)]
            device_X = torch.cat(parts_X)
            host_X = torch.empty(len(device_X), dtype=torch.uint8, pin_memory=True)
            host_X.copy_(device_X, non_blocking=True)
            self._stream.synchronize()
        return host_X.numpy().data

    def read_snapshot(self, slot: SlotId, window: Sequence[BlockId], fence: Fence) -> memoryview:
        """Return the stored bytes of a snapshot, as what was launched before the fence left it.

        Nothing may write it meanwhile.
        """
        with torch.inference_mode():
            if self._stream is None:
                return self.snapshots.encode(slot, window).numpy().data
            with torch.cuda.stream(self._stream):
                if fence is not None:
                    self._stream.wait_event(fence)
                rest_X = self.snapshots.encode(slot, window)
                host_X = torch.empty(len(rest_X), dtype=torch.uint8, pin_memory=True)
                host_X.copy_(rest_X, non_blocking=True)
                self._stream.synchronize()
        return host_X.numpy().data

    def room(self, num_bytes: int) -> memoryview:
        """Return memory for that many bytes, whose contents are undefined; pinned on a GPU."""
        if self._stream is None:
            return np.empty(num_bytes, np.uint8).data
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data

    def write(self, blocks: Sequence[int], slots: Sequence[int], data: bytearray | memoryview, fence: Fence) -> None:
        """Write the bytes of blocks and slots, one after the other, after what was launched before the fence.

        Nothing may read or write them meanwhile. They are written when this returns.
        """
        cut = len(blocks) * self._block_BX.shape[1]
        if self._stream is None:
            data_X = np.frombuffer(data, np.uint8)
            self._block_BX.numpy()[list(blocks)] = data_X[:cut].reshape(len(blocks), self._block_BX.shape[1])
            self._slot_SX.numpy()[list(slots)] = data_X[cut:].reshape(len(slots), self._slot_SX.shape[1])
            return
        host_X = torch.frombuffer(data, dtype=torch.uint8)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            # Memory that is pinned already, as that of ``room``, is not copied.
            device_X = host_X.pin_memory().to(self._device, non_blocking=True)
            if blocks:
                self._block_BX[list(blocks)] = device_X[:cut].view(len(blocks), -1)
            if slots:
                self._slot_SX[list(slots)] = device_X[cut:].view(len(slots), -1)
            self._stream.synchronize()

    def write_snapshot(self, slot: SlotId, window: Sequence[BlockId], data: memoryview, fence: Fence) -> None:
        """Write a snapshot from its stored bytes, after what was launched before the fence.

        Nothing may read or write it meanwhile. It is written when this returns.
        """
        host_X = torch.frombuffer(data, dtype=torch.uint8)
        with torch.inference_mode():
            if self._stream is None:
                self.snapshots.decode(slot, window, [host_X])
                return
            with torch.cuda.stream(self._stream):
                if fence is not None:
                    self._stream.wait_event(fence)
                self.snapshots.decode(slot, window, [host_X.pin_memory()])
                self._stream.synchronize()
