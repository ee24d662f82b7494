"""A simulated device, whose memory holds tokens instead of tensors.

A block holds 64 cells, each the token whose keys and values it stands for. A slot holds the tokens whose state it
claims to be, a log those that are not folded into one yet. Blocks and slots are views of the same slabs, as on a real
device: writing one overwrites the other. Whatever is free holds poison, so that a step that reads what it should not is
found at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import assert_never

from strandline.cache import Lease, PrefixCache, StepGrant
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.size import WindowClass
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tree import Run
from strandline.cache.window_blocks import Windows
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK, NULL_LOG, NULL_SLOT, BlockId, LogId, SlotId, TransferId
from strandline.records.actions import (
    Action,
    CancelTransfer,
    CopyTokens,
    DropBlocks,
    DropSlot,
    DropStored,
    FoldLog,
    LoadIn,
    MoveBlock,
    StoredPath,
    StoreOut,
)
from strandline.records.tokens import BLOCK_KEY_BYTES, decode

POISON = -1
NO_STATE = (-2,)
"""What a store has of the null slot."""

Tokens = tuple[int, ...]
Cells = list[list[int]]
"""Those of several blocks."""


class Device:
    """Memory that checks the tokens of every read and write.

    Args:
        windows: sizes of windows.
        num_computed_again: tokens of windows that are stored, but not seen by the token after a snapshot: the last ones
            before the snapshot are computed again.
    """

    def __init__(
        self,
        num_slabs: int,
        blocks_per_slab: int,
        windows: Sequence[WindowClass] = (),
        num_computed_again: int = 0,
    ) -> None:
        self._blocks_per_slab = blocks_per_slab
        self._windows, self._num_computed_again = windows, num_computed_again
        self._window_cells = [
            [[POISON] * BLOCK_TOKENS for _ in range(num_slabs * window.blocks_per_slab)] for window in windows
        ]
        """By size of windows and block."""
        self._cells = [[POISON] * BLOCK_TOKENS for _ in range(num_slabs * blocks_per_slab)]
        self._states: list[Tokens | None] = [None] * num_slabs
        self._logs: dict[LogId, Tokens] = {}
        self.num_writes = [0] * num_slabs
        """How often each slot was written or dropped, which is constant while it is published."""
        self.stored: dict[int, Tokens] = {}
        """What a store holds, by address: a block's tokens, or those whose state it is."""
        self.stored_windows: dict[int, list[Cells]] = {}
        """By address of a state: the cells of its window blocks of each size."""
        self.loading: dict[TransferId, LoadIn] = {}
        self._loaded: dict[TransferId, dict[int, Tokens]] = {}
        """By load under way: what it reads, which may be freed meanwhile."""
        self._loaded_windows: dict[TransferId, dict[int, list[Cells]]] = {}
        self._held: set[int] = set()
        """Blocks whose content is still being stored: only loads may overwrite them."""
        self.storing: list[TransferId] = []
        self.spilling: dict[TransferId, StoreOut] = {}
        """Stores whose sources must stay as they are until they end."""
        self.cancelled: set[TransferId] = set()

    def cells(self, block: BlockId) -> list[int]:
        return list(self._cells[block])

    def state(self, slot: SlotId) -> Tokens | None:
        """Return the tokens whose state the slot holds, or None when it is poisoned."""
        return () if slot == NULL_SLOT else self._states[slot]

    def _stored_state(self, slot: SlotId) -> Tokens:
        return NO_STATE if slot == NULL_SLOT else self.state(slot) or ()

    def _slab(self, slot: SlotId) -> range:
        """Return the blocks of a slot."""
        size = self._blocks_per_slab
        return range(slot * size, (slot + 1) * size if slot != NULL_SLOT else 0)

    def apply(self, actions: Sequence[Action]) -> None:
        """Apply actions in order."""
        self._apply(actions)
        assert not self._held, "what was not copied aside is not loaded over"

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case CopyTokens(src, dst, num_tokens, lifetime) if lifetime:
                    copied = self._window_cells[lifetime - 1][src][:num_tokens]
                    assert POISON not in copied, f"{action} copies poison"
                    self._write_window_cells(lifetime, dst, 0, copied)
                case MoveBlock(src, dst, lifetime) if lifetime:
                    is_loading = self._is_window_loading(lifetime, src)
                    assert not is_loading, f"window block {src} is moved while it is loaded"
                    self._write_window_cells(lifetime, dst, 0, self._window_cells[lifetime - 1][src])
                    self._window_cells[lifetime - 1][src] = [POISON] * BLOCK_TOKENS
                case DropBlocks(blocks, lifetime) if lifetime:
                    for block in blocks:
                        is_loading = self._is_window_loading(lifetime, block)
                        assert not is_loading, f"window block {block} is freed while it is loaded"
                        self._window_cells[lifetime - 1][block] = [POISON] * BLOCK_TOKENS
                case CopyTokens(src, dst, num_tokens):
                    assert POISON not in self._cells[src][:num_tokens], f"{action} copies poison"
                    self._write_cells(dst, 0, self._cells[src][:num_tokens])
                case MoveBlock(src, dst):
                    assert not self._is_loading(block=src), f"block {src} is moved while it is loaded"
                    assert not self._is_spilling(src), f"block {src} is moved while it is stored"
                    self._write_cells(dst, 0, self._cells[src])
                    self._cells[src] = [POISON] * BLOCK_TOKENS
                case DropBlocks(blocks):
                    for block in blocks:
                        assert not self._is_loading(block=block), f"block {block} is freed while it is loaded"
                        assert not self._is_spilling(block), f"block {block} is freed while it is stored"
                        self._cells[BlockId(block)] = [POISON] * BLOCK_TOKENS
                case DropSlot(slot):
                    assert not self._is_loading(slot=slot), f"slot {slot} is freed while it is loaded"
                    self._states[slot] = None
                    self.num_writes[slot] += 1
                case FoldLog(slot, log, num_tokens, holds_drafts):
                    assert holds_drafts or num_tokens == len(self._logs[log]), "windows are those of all its tokens"
                    # The slot may have been freed since; then its content does not matter.
                    if (state := self.state(slot)) is not None:
                        self._states[slot] = state + self._logs[log][:num_tokens]
                        self.num_writes[slot] += 1
                case LoadIn(transfer):
                    assert transfer not in self.loading
                    self.loading[transfer] = action
                    self._held -= {block for block, _ in action.blocks}
                    self._held.difference_update(*(self._slab(slot) for slot, *_ in action.snapshots))
                    self._loaded[transfer] = {address: self.stored[address] for address in action.addresses}
                    windows = {each.address: self.stored_windows.get(each.address, []) for each in action.snapshots}
                    self._loaded_windows[transfer] = windows
                case StoreOut(transfer, path=StoredPath()):
                    self.spilling[transfer] = action
                case StoreOut(transfer, _, block_addresses, slot_addresses):
                    self.storing.append(transfer)
                    if action.is_held:
                        self._held.update(block for block, _ in block_addresses)
                        self._held.update(*(self._slab(slot) for slot, *_ in slot_addresses))
                    for block, address in block_addresses:
                        assert address not in self.stored, f"address {address} is used twice"
                        self.stored[address] = tuple(self._cells[block])
                    for each in slot_addresses:
                        self.stored[each.address] = self._stored_state(each.slot)
                        self.stored_windows[each.address] = self._cells_of(each.windows)
                case DropStored(store, addresses):
                    kept = [load for load in self.loading.values() if load.store == store != "host"]
                    read = {address for load in kept for address in load.addresses}
                    read |= {source for spill in self.spilling.values() for source, _ in spill.stored}
                    for stored in addresses:
                        assert stored not in read, f"address {stored} is freed while it is read"
                        self.stored.pop(stored, None)
                        self.stored_windows.pop(stored, None)
                case CancelTransfer(transfer):
                    self.cancelled.add(transfer)
                case _:
                    assert_never(action)

    def end_load(self, transfer: TransferId) -> None:
        """End a transfer well: write what the store holds, at once, however long it took."""
        action, loaded = self.loading.pop(transfer), self._loaded.pop(transfer)
        for block, address in action.blocks:
            tokens = loaded[address]
            self._write_cells(block, 0, (*tokens, *[POISON] * (BLOCK_TOKENS - len(tokens))))
        windows = self._loaded_windows.pop(transfer)
        for slot, address, targets in action.snapshots:
            if slot != NULL_SLOT:
                self._write_state(slot, loaded[address])
            for number, (window, stored) in enumerate(zip(targets, windows[address], strict=True), 1):
                for block, cells in zip(window, stored, strict=True):
                    self._write_window_cells(number, block, 0, cells)

    def fail_load(self, transfer: TransferId) -> None:
        """End a transfer badly: what it was to write is poison."""
        action = self.loading.pop(transfer)
        del self._loaded[transfer], self._loaded_windows[transfer]
        for block, _ in action.blocks:
            self._write_cells(block, 0, [POISON] * BLOCK_TOKENS)
        for slot, _, windows in action.snapshots:
            if slot != NULL_SLOT:
                self._write_state(slot, (POISON,))
            for number, window in enumerate(windows, 1):
                for block in window:
                    self._write_window_cells(number, block, 0, [POISON] * BLOCK_TOKENS)

    def end_spill(self, transfer: TransferId, *, is_done: bool) -> None:
        """End a store whose sources were kept: copy what they hold by now."""
        action = self.spilling.pop(transfer)
        assert action.path is not None
        sources = {address: self.stored[source] for source, address in action.stored}
        sources |= {address: tuple(self._cells[block]) for block, address in action.blocks}
        sources |= {address: self._stored_state(slot) for slot, address, _ in action.snapshots}
        windows = {to: self.stored_windows[source] for source, to in action.stored if source in self.stored_windows}
        windows |= {each.address: self._cells_of(each.windows) for each in action.snapshots}
        path = action.path
        assert sources.keys() == {*path.addresses.values(), path.address, path.tail_address} - {0}, (
            "what is stored is another path"
        )
        tokens = tuple(decode(path.data))
        for index, address in path.addresses.items():
            assert sources[address] == tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
        assert sources.get(path.address, tokens) in (NO_STATE, tokens), (
            "the slot that is stored is not that of its path"
        )
        inside = tokens[len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS :]
        assert sources.get(path.tail_address, inside)[: len(inside)] == inside
        if is_done:
            self.stored |= sources
            self.stored_windows |= windows

    def _cells_of(self, windows: Sequence[Sequence[int]]) -> list[Cells]:
        """Return a copy of the cells of window blocks of each size."""
        pairs = zip(self._window_cells, windows, strict=True)
        return [[list(cells[block]) for block in window] for cells, window in pairs]

    def _is_spilling(self, block: int) -> bool:
        return any(source == block for spill in self.spilling.values() for source, _ in spill.blocks)

    def _loading_windows(self, lifetime: int) -> set[int]:
        """Return the window blocks of a size that are being loaded."""
        snapshots = (each for action in self.loading.values() for each in action.snapshots)
        return {target for each in snapshots for target in each.windows[lifetime - 1]}

    def _is_window_loading(self, lifetime: int, block: int) -> bool:
        return block in self._loading_windows(lifetime)

    def _is_slab_of_windows_loading(self, slab: int) -> bool:
        """Whether a window block in a slab is being loaded."""
        return any(
            target // window.blocks_per_slab == slab
            for number, window in enumerate(self._windows, 1)
            for target in self._loading_windows(number)
        )

    def _is_loading(self, *, block: int = NULL_BLOCK, slot: int = NULL_SLOT) -> bool:
        if not self.loading:
            return False
        size = self._blocks_per_slab
        if slot and self._is_slab_of_windows_loading(slot):
            return True
        blocks = {target for action in self.loading.values() for target, _ in action.blocks}
        slots = {each.slot for action in self.loading.values() for each in action.snapshots}
        if slot:
            return slot in slots or any(target // size == slot for target in blocks)
        return block in blocks or block // size in slots - {NULL_SLOT}

    def run_step(self, lease: Lease, end: int, cache: PrefixCache, grant: StepGrant) -> None:
        """Compute the lease's tokens up to ``end``, and check everything that this reads and writes."""
        tokens = tuple(decode(lease.tokens.data))
        assert lease.computed < end <= len(tokens)
        self._check_state(lease, tokens)
        writable = max(lease.kv_start, lease.computed)
        for block, start, expected in _by_block(lease, tokens[:writable]):
            assert self._cells[block][: len(expected)] == list(expected), f"keys of tokens from {start} on are wrong"
        claimed = claimed_cells(cache)
        for position in range(writable, end):
            block, cell = BlockId(lease.table[position // BLOCK_TOKENS]), position % BLOCK_TOKENS
            assert cell >= claimed.get(block, 0), f"token {position} overwrites the published block {block}"
            self._write_cells(block, cell, tokens[position : position + 1])
        self._run_window(lease, end, tokens)
        if cache.internals().rule.needs_slots:
            self._run_state(lease, end, cache, grant, tokens)
        else:
            assert grant == (NULL_SLOT, NULL_SLOT, (), NULL_LOG, 0, end - lease.computed)

    def _run_window(self, lease: Lease, end: int, tokens: Tokens) -> None:
        """Write the keys of layers with windows, whose windows were checked; no other windows have them."""
        self._check_windows(lease.windows, lease.computed, tokens)
        for number, window in enumerate(lease.windows, 1):
            for position in range(lease.computed, end):
                block, cell = window.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                self._write_window_cells(number, BlockId(block), cell, tokens[position : position + 1])

    def _check_windows(self, windows: Windows, position: int, tokens: Tokens) -> None:
        """Check that windows hold what computing from a position on reads."""
        for size, all_cells, window in zip(self._windows, self._window_cells, windows, strict=True):
            seen = max(position - (size.num_tokens - self._num_computed_again) + 1, 0)
            for index in range(seen // BLOCK_TOKENS, -(-position // BLOCK_TOKENS)):
                known = list(tokens[index * BLOCK_TOKENS : min((index + 1) * BLOCK_TOKENS, position)])
                cells, first = all_cells[window.blocks[index]], max(seen - index * BLOCK_TOKENS, 0)
                assert cells[first : len(known)] == known[first:], f"the window before {position} is not what it claims"

    def put_windows(self, address: int, tokens: Sequence[int]) -> None:
        """Store the windows of a snapshot after these tokens."""
        self.stored_windows[address] = []
        for size in self._windows:
            first = max(len(tokens) - size.num_tokens + 1, 0) // BLOCK_TOKENS
            starts = range(first * BLOCK_TOKENS, len(tokens), BLOCK_TOKENS)
            cells = [list(tokens[start : start + BLOCK_TOKENS]) for start in starts]
            stored = [block + [POISON] * (BLOCK_TOKENS - len(block)) for block in cells]
            self.stored_windows[address].append(stored)

    def _check_stored_windows(self, address: int, tokens: Tokens) -> None:
        """Check that a store has what computing after a snapshot reads."""
        position = len(tokens)
        for size, cells in zip(self._windows, self.stored_windows[address], strict=True):
            first = max(position - size.num_tokens + 1, 0)
            start = (-(-position // BLOCK_TOKENS) - len(cells)) * BLOCK_TOKENS
            known = [cell for block in cells for cell in block][first - start : position - start]
            assert known == list(tokens[first:]), f"the stored window before {position} is another"

    def _run_state(self, lease: Lease, end: int, cache: PrefixCache, grant: StepGrant, tokens: Tokens) -> None:
        """Compute the state of the lease's tokens up to ``end``."""
        published = {snapshot.slot for _, _, snapshot in published_snapshots(cache)}
        in_use = {other.src for other in cache.internals().leases.values() if other.src != other.dst}
        start = len(self.state(grant.src) or ()) + grant.num_logged
        assert start == lease.computed, f"the state and the log end at {start}, the step starts at {lease.computed}"
        assert grant.num_folded in (0, grant.num_logged + end - start), f"{grant} folds part of the tokens"
        folded = lease.folded + grant.num_folded
        targets = {slot: position for position, slot in grant.cuts}
        if grant.num_folded:
            targets[grant.dst] = folded
        else:
            assert grant.src == grant.dst, "nothing is folded, and the state moves"
        for slot, position in targets.items():
            assert slot not in published | in_use, f"the step overwrites the published slot {slot}"
            self._write_state(slot, tokens[:position])
        self._logs[grant.log] = tokens[folded:end]

    def _check_state(self, lease: Lease, tokens: Tokens) -> None:
        if lease.dst == NULL_SLOT:
            assert lease.src == NULL_SLOT, "a lease without a slot reads one"
            return
        assert self.state(lease.src) == tokens[: lease.folded], f"{lease.request_id} has another state"
        if lease.num_logged:
            assert self._logs[lease.log] == tokens[lease.folded : lease.computed], f"{lease.request_id}: another log"

    def _write_cells(self, block: BlockId, start: int, tokens: Sequence[int]) -> None:
        assert block != NULL_BLOCK, "the null block is written"
        assert not self._is_loading(block=block), f"block {block} is written while it is loaded"
        slab = block // self._blocks_per_slab
        assert not self._is_slab_of_windows_loading(slab), f"block {block} is written where a window is loaded"
        assert block not in self._held, f"block {block} is written while it is stored"
        self._states[block // self._blocks_per_slab] = None
        self._poison_windows(block // self._blocks_per_slab)
        self._cells[block][start : start + len(tokens)] = tokens

    def _write_window_cells(self, lifetime: int, block: BlockId, start: int, tokens: Sequence[int]) -> None:
        assert block != NULL_BLOCK, "the null block is written"
        is_loading = self._is_window_loading(lifetime, block)
        assert not is_loading, f"window block {block} is written while it is loaded"
        slab = block // self._windows[lifetime - 1].blocks_per_slab
        self._states[slab] = None
        self._poison_windows(slab, kept=lifetime)
        for other in range(slab * self._blocks_per_slab, (slab + 1) * self._blocks_per_slab):
            assert not self._is_loading(block=other), f"window block {block} is written while its slab is loaded"
            self._cells[other] = [POISON] * BLOCK_TOKENS
        self._window_cells[lifetime - 1][block][start : start + len(tokens)] = tokens

    def _poison_windows(self, slab: int, kept: int = 0) -> None:
        """Poison the window blocks of all sizes but one in a slab."""
        for number, (window, cells) in enumerate(zip(self._windows, self._window_cells, strict=True), 1):
            if number != kept:
                size = window.blocks_per_slab
                cells[slab * size : (slab + 1) * size] = [[POISON] * BLOCK_TOKENS for _ in range(size)]

    def _write_state(self, slot: SlotId, tokens: Tokens) -> None:
        assert slot != NULL_SLOT, "the null slot is written"
        assert not self._is_loading(slot=slot), f"slot {slot} is written while it is loaded"
        first = slot * self._blocks_per_slab
        for block in range(first, first + self._blocks_per_slab):
            assert block not in self._held, f"slot {slot} is written while it is stored"
            self._cells[block] = [POISON] * BLOCK_TOKENS
        self._poison_windows(slot)
        self._states[slot] = tokens
        self.num_writes[slot] += 1

    def verify(self, cache: PrefixCache, tiers: Iterable[LowerTier]) -> None:
        """Check the content of everything published and of everything that leases hold."""
        for _, key, snapshot in published_snapshots(cache):
            has_state = snapshot.slot != NULL_SLOT
            assert not has_state or self.state(snapshot.slot) == tokens_of(key), (
                f"slot {snapshot.slot} is not what it claims"
            )
            self._check_windows(snapshot.windows, snapshot.position, tokens_of(key))
        for lease in cache.internals().leases.values():
            tokens = tokens_of(bytes(lease.tokens.data))
            self._check_state(lease, tokens)
            if (fallback := lease.fallback) is not None:
                has_state = fallback.slot != NULL_SLOT
                is_right = not has_state or self.state(fallback.slot) == tokens[: fallback.position]
                assert is_right, "a fallback is not what it claims"
                if fallback.windows is not None:
                    self._check_windows(fallback.windows, fallback.position, tokens)
            if lease.is_request and lease.windows:
                self._check_windows(lease.windows, lease.computed, tokens)
            ready = tokens[: max(lease.kv_start, lease.computed)]
            for block, _, expected in _by_block(lease, ready):
                assert self._cells[block][: len(expected)] == list(expected), f"block {block} of {lease.request_id}"
        self._verify_tiers(tiers)
        for run in runs(cache):
            for index, block in enumerate(run.blocks):
                known = decode(run.tokens[index * BLOCK_TOKENS * 4 : (index + 1) * BLOCK_TOKENS * 4])
                assert self._cells[block][: len(known)] == known, f"the index's block {block} is wrong"

    def _verify_tiers(self, tiers: Iterable[LowerTier]) -> None:
        """Check the content of all that rests below the device."""
        for tier in tiers:
            for copy in tier.snapshots():
                snapshot = copy.snapshot
                if copy.address:
                    is_right = self.stored[copy.address] in (NO_STATE, tokens_of(snapshot.path()))
                    assert is_right, "a demoted snapshot is another"
                    if self._windows:
                        self._check_stored_windows(copy.address, tokens_of(snapshot.path()))
                        num_slot_blocks = self._blocks_per_slab * (self.stored[copy.address] != NO_STATE)
                        num_blocks = num_slot_blocks + sum(map(len, self.stored_windows[copy.address]))
                        assert tier.snapshot_blocks(copy.position) == num_blocks, "a window is counted inexactly"
                if copy.tail_address:
                    known = tokens_of(snapshot.tail)
                    assert self.stored[copy.tail_address][: len(known)] == known, "a demoted tail is another"
                for run in snapshot.home.ancestry():
                    for index, address in enumerate(tier.column.addresses_in(run)):
                        known = tokens_of(bytes(run.tokens[index * BLOCK_KEY_BYTES : (index + 1) * BLOCK_KEY_BYTES]))
                        assert not address or self.stored[address] == known, "a demoted block is another"


@lru_cache(2**14)
def tokens_of(data: bytes) -> Tokens:
    """Return encoded tokens; what does not change is decoded once."""
    return tuple(decode(data))


def _by_block(lease: Lease, tokens: Tokens) -> Iterator[tuple[BlockId, int, Tokens]]:
    """Yield the lease's blocks with the position and the tokens that each should hold."""
    for start in range(0, len(tokens), BLOCK_TOKENS):
        yield BlockId(lease.table[start // BLOCK_TOKENS]), start, tokens[start : start + BLOCK_TOKENS]


def runs(cache: PrefixCache) -> list[Run]:
    """Return all runs of the index but the roots."""
    found = [child for root in cache.internals().index.roots.values() for child in root.children.values()]
    for run in found:
        found.extend(run.children.values())
    return found


def claimed_cells(cache: PrefixCache) -> dict[BlockId, int]:
    """Return how many tokens of each published block are readable."""
    return {
        BlockId(block): min(BLOCK_TOKENS, len(run.tokens) // 4 - index * BLOCK_TOKENS)
        for run in runs(cache)
        for index, block in enumerate(run.blocks)
    }
