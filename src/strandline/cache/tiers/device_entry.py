"""Entries of the device as sources of moves to tiers: it evicts them or retains them, and nothing has to be freed."""

from typing import NamedTuple

from strandline.cache.tiers.stored import Copy, TierSnapshot
from strandline.cache.tree import Run, Snapshot, path_blocks, run_of_last_block
from strandline.cache.window_blocks import Windows
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NO_ADDRESS, NULL_SLOT, BlockId, SlotId
from strandline.records.account import SnapshotKind
from strandline.records.actions import SnapshotCopy, StoredPath


class Sources(NamedTuple):
    """Where a transfer reads, as in ``StoreOut``."""

    blocks: tuple[tuple[BlockId, int], ...]
    snapshots: tuple[SnapshotCopy, ...]
    stored: tuple[tuple[int, int], ...] = ()


class DeviceEntry(NamedTuple):
    """A snapshot of the device or, without snapshots, the end of a path, with what it needs."""

    copy: Copy
    """Its copy for a tier."""
    run: Run
    """One that holds the last block that it needs."""
    slot: SlotId = NULL_SLOT
    windows: Windows = ()

    def sources(self, path: StoredPath) -> Sources:
        """Return where it is read."""
        table = path_blocks(self.run) if path.addresses else ()
        blocks = [(BlockId(table[index]), address) for index, address in path.addresses.items()]
        if path.tail_address != NO_ADDRESS:
            tail = self.run.blocks[self.copy.snapshot.num_blocks - self.run.start_block]
            blocks.append((BlockId(tail), path.tail_address))
        has_snapshot = path.address != NO_ADDRESS
        windows = tuple(window.ids for window in self.windows)
        snapshots = (SnapshotCopy(self.slot, path.address, windows),) if has_snapshot else ()
        return Sources(tuple(blocks), snapshots)


def device_entry(entry: Snapshot | Run) -> DeviceEntry:
    """Return a snapshot or, without snapshots, the end of a run with all that it needs."""
    if isinstance(entry, Run):
        return DeviceEntry(device_copy(entry), entry)
    run = run_of_last_block(entry)
    if run is None:
        raise CacheInvariantError(f"the snapshot at {entry.position} has no block")
    return DeviceEntry(device_copy(entry), run, entry.slot, entry.windows)


def device_copy(entry: Snapshot | Run, *, kept: int = 0) -> Copy:
    """Return an entry as a tier would store it.

    Args:
        kept: number of blocks that a run retains.
    """
    if isinstance(entry, Run):
        end, num_tokens = TierSnapshot(entry, (entry.end_block, b"")), (len(entry.blocks) - kept) * BLOCK_TOKENS
        return Copy(end, SnapshotKind.GENERATION_END, entry.use, num_tokens, is_shared=entry.is_shared)
    flags = entry.is_shared, entry.is_superseded, entry.num_continuations > 0
    return Copy(TierSnapshot(entry.home, entry.key), entry.kind, entry.use, entry.saved_tokens, *flags)
