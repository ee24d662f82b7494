"""Consistency checks of the cache, for tests and debug mode. Linear in its size.

Where a check repeats for every run or snapshot, it formats its message only when it fails: tests run these millions of
times.
"""

from collections import Counter
from itertools import chain

from strandline.cache.announcing.announcer import Announcer
from strandline.cache.core import PrefixCache
from strandline.cache.eviction import Entry, resolve
from strandline.cache.internals import Internals
from strandline.cache.lease import Lease
from strandline.cache.probation import max_probes
from strandline.cache.tiers.loads import Loads
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.path_blocks import located
from strandline.cache.tiers.paths import Block, path_to
from strandline.cache.tiers.stored import Column, Copy, TierSnapshot, stored_of
from strandline.cache.tiers.tier_sources import ExchangedCopy, RetainedCopy
from strandline.cache.tiers.tier_target import TierTarget
from strandline.cache.traversal import (
    all_runs_below,
    continuations,
    demoted_after,
    is_on_device,
    runs_below,
    stored_keys,
)
from strandline.cache.tree import (
    Run,
    Snapshot,
    child_with_prefix,
    find_home,
    path_blocks,
    position_of,
    tail_that_begins,
)
from strandline.cache.window_blocks import Window, WindowBlocks
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NO_ADDRESS, NULL_BLOCK, NULL_LOG, NULL_SLOT
from strandline.records.account import SnapshotKind
from strandline.records.tokens import BLOCK_KEY_BYTES


def check(checked: PrefixCache) -> None:
    """Verify every invariant of the cache.

    Raises:
        CacheInvariantError: one does not hold; the message names the first.
    """
    cache = checked.internals()
    runs = [run for root in cache.index.roots.values() for run in runs_below(root)]
    for run in runs:
        _check_run(run)
    snapshots = [snapshot for run in runs for snapshot in run.snapshots.values()]
    if isinstance(cache.memory.announcer, Announcer):
        known = () if cache.below is None else cache.below.known_roots()
        for root in dict.fromkeys((*cache.index.roots.values(), *known)):
            _check_announced(cache.memory.announcer, root)
    _check_users(cache, runs)
    _check_owners(cache, runs, snapshots)
    _check_evictable(cache, runs, snapshots)
    _check_waiters(cache, [*runs, *snapshots])
    _check_logs(cache)
    _check_window_blocks(cache, snapshots)
    for lease in cache.leases.values():
        _check_lease(lease)
    _check_index(cache)
    _check_probes(cache, snapshots)
    if isinstance(cache.below, Loads):
        _check_tree(cache.below)
        targets = [move.target for move in cache.below.moves if isinstance(move.target, TierTarget)]
        for tier in cache.below.tiers:
            _check_tier(tier, [target for target in targets if target.tier is tier])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CacheInvariantError(message)


def _wrong(run: Run, text: str) -> CacheInvariantError:
    return CacheInvariantError(f"run [{run.start_block}, {run.end_block}): {text}")


def _check_run(run: Run) -> None:
    if run.children or run.child_keys:
        _check_children(run)
    if run.parent is not None and len(run.tokens) != len(run.blocks) * BLOCK_KEY_BYTES and not run.is_tail:
        raise _wrong(run, f"{len(run.tokens)} key bytes")
    if run.keys or run.snapshots:
        _check_snapshots(run)


def _check_children(run: Run) -> None:
    if run.child_keys != sorted(run.children):
        raise _wrong(run, "children out of order")
    if len(set(map(len, run.child_keys))) > 1:  # a key can begin longer ones alone
        for key in run.children:
            if tail_that_begins(run, key) is not None:
                raise _wrong(run, "a child's key begins another's")
    end = run.end_block
    for key, child in run.children.items():
        if child.parent is not run or child.first_key != key:
            raise _wrong(run, "child linked under another key")
        if child.start_block != end:
            raise _wrong(run, f"child starts at {child.start_block}")
    if run.parent is not None and run.is_tail:
        raise _wrong(run, "a tail with children")


def _check_snapshots(run: Run) -> None:
    if run.keys != sorted(run.snapshots):
        raise _wrong(run, "keys of snapshots out of order")
    if run.parent is not None and run.is_tail:
        raise _wrong(run, "a tail with snapshots")
    for key, snapshot in run.snapshots.items():
        num_blocks, tail = key
        if snapshot.position != position_of(key):
            raise _wrong(run, f"snapshot at {snapshot.position} has the key of another position")
        if not (run.start_block < num_blocks or run.parent is None) or num_blocks > run.end_block:
            raise _wrong(run, f"snapshot at {snapshot.position} belongs elsewhere")
        if snapshot.home is not run or snapshot.key != key or not snapshot.is_attached:
            raise _wrong(run, f"snapshot at {snapshot.position} detached")
        if not _continues_with(run, num_blocks, tail):
            raise _wrong(run, f"snapshot at {snapshot.position} has no KV")


def _continues_with(run: Run, num_blocks: int, tokens: bytes) -> bool:
    """Return whether a block follows the block before ``num_blocks`` that begins with some tokens."""
    if num_blocks < run.end_block:
        return run.tokens.startswith(tokens, (num_blocks - run.start_block) * BLOCK_KEY_BYTES)
    return not tokens or child_with_prefix(run, tokens) is not None


def _check_announced(announcer: Announcer, root: Run) -> None:
    for run in [*all_runs_below(root)][::-1]:
        if run.parent is not None:
            wanted = announcer.num_resumable(run)
            if run.num_announced != wanted:
                raise _wrong(run, f"{run.num_announced} blocks announced, not {wanted}")
            if not wanted <= len(run.hashes) <= run.end_block - run.start_block:
                raise _wrong(run, f"{len(run.hashes)} hashes")


def _check_users(cache: Internals, runs: list[Run]) -> None:
    tails = [lease.tail for lease in cache.leases.values() if lease.tail is not None]
    paths = [lease.run.ancestry() for lease in cache.leases.values()]
    users, live = Counter(chain(tails, *paths)), set(tails)
    for run in runs:
        if run.num_users != users.get(run, 0):
            raise _wrong(run, f"{run.num_users} users counted")
        if run.is_live != (run in live):
            raise _wrong(run, "a tail is live without a lease")


def _check_owners(cache: Internals, runs: list[Run], snapshots: list[Snapshot]) -> None:
    slots, blocks = cache.allocator.used()
    block_owners = Counter(chain.from_iterable(run.blocks for run in runs if not run.is_live))
    slot_owners = Counter(snapshot.slot for snapshot in snapshots)
    slot_owners.update(snapshot.slot for snapshot in _detached(cache))
    del slot_owners[NULL_SLOT]
    published = set(slot_owners)
    for lease in cache.leases.values():
        block_owners.update(lease.table[lease.num_published :])
        owners = set(map(cache.memory.owner, lease.table[lease.num_published :]))
        _require(owners <= {None, lease.tail}, f"{lease.request_id}: a block of its own has an owner in the index")
        writes_slot = bool(cache.states.num_slots) and lease.is_request
        _require((lease.dst != NULL_SLOT) == writes_slot, f"{lease.request_id} writes slot {lease.dst}")
        slot_owners[lease.dst] += writes_slot
        slot_owners.update(cut.slot for cut in lease.cuts)
        slot_owners.update([lease.fallback.slot] if lease.fallback is not None else [])
        _require(lease.dst not in published, f"{lease.request_id} writes the published slot {lease.dst}")
    if block_owners.keys() != blocks:
        raise CacheInvariantError(f"blocks leaked or lost: {block_owners.keys() ^ blocks}")
    del slot_owners[NULL_SLOT]
    slot_owners = +slot_owners
    if slot_owners.keys() != slots:
        raise CacheInvariantError(f"slots leaked or lost: {slot_owners.keys() ^ slots}")
    counted = (cache.allocator.num_slots, cache.allocator.num_blocks)
    if counted != (len(slots), len(blocks)):
        raise CacheInvariantError(f"{counted} slots and blocks counted, {len(slots)}, {len(blocks)} used")
    for run in runs:
        if not set(map(cache.memory.owner, run.blocks)) <= {run}:
            raise _wrong(run, "a block's owner is not recorded")
    doubles = [each for owners in (block_owners, slot_owners) for each, number in owners.items() if number > 1]
    _require(not doubles, f"owned twice: {doubles}")


def _detached(cache: Internals) -> list[Snapshot]:
    """Return the snapshots that only leases hold."""
    read = dict.fromkeys(snapshot for lease in cache.leases.values() for snapshot in _read_by(lease))
    return [snapshot for snapshot in read if not snapshot.is_attached]


def _read_by(lease: Lease) -> tuple[Snapshot, ...]:
    """Return the snapshots that a lease keeps from eviction."""
    return (lease.held or ()) if lease.source is None else (lease.source,)


def _check_evictable(cache: Internals, runs: list[Run], snapshots: list[Snapshot]) -> None:
    memory = cache.memory
    num_blocks = sum(len(run.blocks) for run in runs if run.num_users == 0)
    _require(memory.num_evictable_blocks == num_blocks, f"{memory.num_evictable_blocks} evictable, not {num_blocks}")
    if not memory.are_queued(runs, snapshots):
        raise CacheInvariantError("an entry that may be evicted is not in the queue")
    num_slots = sum(snapshot.num_slots for snapshot in snapshots if snapshot.num_readers == 0)
    _require(memory.num_evictable_slots == num_slots, f"{memory.num_evictable_slots} evictable, not {num_slots}")
    readers = Counter(snapshot for lease in cache.leases.values() for snapshot in _read_by(lease))
    for snapshot in snapshots:
        if snapshot.num_readers != readers.get(snapshot, 0):
            raise CacheInvariantError(f"snapshot {snapshot.slot}: readers miscounted")


def _check_waiters(cache: Internals, entries: list[Entry]) -> None:
    waiters = Counter(resolve(source) for source in cache.expected.values())
    for entry in entries:
        if entry.num_waiters != waiters.get(entry, 0):
            raise CacheInvariantError(f"{entry.num_waiters} waiters of {entry} counted")
    _require(not cache.expected.keys() & cache.leases.keys(), "a running request counts as waiting")


def _check_probes(cache: Internals, snapshots: list[Snapshot]) -> None:
    num_probes = sum(snapshot.kind is SnapshotKind.PROBE for snapshot in snapshots)
    _require(num_probes <= max_probes(cache.allocator.num_slabs), f"{num_probes} unproven probes are too many")


def _check_logs(cache: Internals) -> None:
    logs = [lease.log for lease in cache.leases.values() if lease.log != NULL_LOG]
    _require(len(set(logs)) == len(logs), f"logs granted twice: {sorted(logs)}")
    if set(logs) != (used := cache.logs.used()):
        raise CacheInvariantError(f"logs leaked or lost: {set(logs) ^ used}")


def _check_window_blocks(cache: Internals, snapshots: list[Snapshot]) -> None:
    if not cache.memory.windows:
        return
    pinned = [lease.windows for lease in cache.leases.values() if lease.windows]
    _require(
        all(len({len(w.blocks) for w in windows}) == 1 for windows in pinned), "windows of a lease end differently"
    )
    cuts = chain.from_iterable((lease.fallback, *lease.cuts) for lease in cache.leases.values())
    pinned += [cut.windows for cut in cuts if cut is not None and cut.windows is not None]
    pinned += [snapshot.windows for snapshot in (*snapshots, *_detached(cache)) if snapshot.num_readers]
    idle = [snapshot.windows for snapshot in snapshots if not snapshot.num_readers]
    for number, size in enumerate(cache.memory.windows):
        _check_blocks_of_windows(size, [windows[number] for windows in pinned], [windows[number] for windows in idle])


def _check_blocks_of_windows(windows: WindowBlocks, pinned: list[Window], idle: list[Window]) -> None:
    for window in (*pinned, *idle):
        held = window.blocks[window.first :]
        if NULL_BLOCK in held or window.blocks[: window.first].count(NULL_BLOCK) != window.first:
            raise CacheInvariantError(f"a window with {window.first} passed blocks is {list(window.blocks)}")
    users = Counter(chain.from_iterable(window.held for window in (*pinned, *idle)))
    _require(set(users) == windows.allocator.used()[1], "window blocks leaked or lost")
    _require(windows.allocator.num_blocks == len(users), "window blocks miscounted")
    recorded = {block: len([*windows.windows_of(block)]) for block in users}
    _require(users == recorded, "the windows of a block miscounted")
    in_use = set(chain.from_iterable(window.held for window in pinned))
    num_idle = len(users.keys() - in_use)
    _require(windows.num_evictable == num_idle, f"{windows.num_evictable} window blocks evictable, not {num_idle}")


def _check_lease(lease: Lease) -> None:
    name = lease.request_id
    table = lease.table[: lease.num_published]
    _require(table == path_blocks(lease.run), f"{name}: its table differs from its path")
    _, data = path_to(lease.run)
    _require(lease.tokens.data.startswith(data), f"{name}: its path holds other tokens")
    _require(0 <= lease.folded <= lease.computed, f"{name}: folded {lease.folded} of {lease.computed} tokens")
    _require(
        lease.folded == lease.computed or lease.has_own_state, f"{name}: a log, but the state is not in its own slot"
    )
    if lease.source is not None:
        _require(lease.src == lease.source.slot, f"{name}: src is not its snapshot's slot")
        _require(lease.source.position == lease.computed, f"{name}: resumes from a snapshot of another position")
        if lease.source.is_attached:
            home, key = find_home(lease.run, lease.tokens.data, lease.computed)
            _require((home, key) == (lease.source.home, lease.source.key), f"{name}: snapshot of another path")


def _check_tree(loads: Loads) -> None:
    """Check that the tree has what tiers have and what moves pin, and nothing else that the device has not."""
    tiers, ends = loads.tiers, chain.from_iterable((move.source, move.target) for move in loads.moves)
    pins = Counter(id(end.pinned) for end in ends if isinstance(end, TierTarget | RetainedCopy | ExchangedCopy))
    for root in tiers[0].tree.roots.values() if tiers else ():
        for run in all_runs_below(root):
            _check_demoted_children(run)
            _check_addresses(run, tiers)
            stored = stored_of(run)
            snapshots = {} if stored is None else stored.snapshots
            if [*stored_keys(run)] != sorted(snapshots):
                raise _wrong_run(run, "keys out of order")
            for key, snapshot in snapshots.items():
                is_right = snapshot.is_used and snapshot.home is run and snapshot.key == key
                is_right &= run.start_block < key[0] <= run.end_block or run.parent is None
                if not is_right:
                    raise _wrong_snapshot(snapshot, "belongs elsewhere")
                if snapshot.num_pins != (num_pins := pins[id(snapshot)]):
                    raise _wrong_snapshot(snapshot, f"has {snapshot.num_pins} pins, not {num_pins}")


def _wrong_snapshot(snapshot: TierSnapshot | Copy, text: str) -> CacheInvariantError:
    return CacheInvariantError(f"the demoted snapshot at {snapshot.position} {text}")


def _wrong_run(run: Run, text: str) -> CacheInvariantError:
    return CacheInvariantError(f"the demoted run [{run.start_block}, {run.end_block}): {text}")


def _check_demoted_children(run: Run) -> None:
    for first_key, child in demoted_after(run).items():
        is_linked = child.parent is run and child.start_block == run.end_block and child.first_key == first_key
        if not is_linked or first_key in run.children:
            raise _wrong_run(run, "a child is linked wrongly")
        if set(child.blocks) != {NULL_BLOCK} or child.children or child.keys or child.num_users:
            raise _wrong_run(child, "is on the device, or something that follows it is")
        is_needed = demoted_after(child) or any(depth == child.end_block for depth, _ in stored_keys(child)[-1:])
        if not is_needed or len(child.tokens) != len(child.blocks) * BLOCK_KEY_BYTES:
            raise _wrong_run(child, "no tier has its last block")


def _check_addresses(run: Run, tiers: tuple[LowerTier, ...]) -> None:
    for tier in tiers:
        has_all = any(map(tier.column.num_blocks_in, continuations(run)))
        last = run.end_block if has_all else _last_block(run, tier.column)
        if tier.column.num_blocks_in(run) != max(last - run.start_block, 0):
            raise _wrong_run(run, f"{tier.column.num_blocks_in(run)} addresses, a tier has blocks up to {last}")


def _last_block(run: Run, column: Column) -> int:
    """Return after which block the tier's deepest snapshot of a run is."""
    return max([copy.snapshot.num_blocks for copy in column.copies(run)], default=0)


def _check_tier(lower: LowerTier, targets: list[TierTarget]) -> None:
    """Check the entries of a tier, which is the target of some moves."""
    num_used = sum(chain(lower.to_free.values(), *(target.sizes.values() for target in targets)))
    arriving = {target.copy for target in targets}
    expected = located([*lower.returning, *(target.blocks for target in targets)])
    num_snapshots = 0
    for root in lower.tree.roots.values():
        for copy in lower.column.below(root):
            num_snapshots += 1
            num_used += _check_copy(copy, lower, is_arriving=copy in arriving)
        for run in all_runs_below(root):
            num_used += _check_blocks(run, lower, expected)
    _require(num_used == lower.num_used, f"{lower.num_used} stored blocks counted, {num_used} used")
    _require(lower.num_used <= lower.num_blocks, f"{lower.num_used} stored blocks in a tier of {lower.num_blocks}")
    _require(lower.num_snapshots == num_snapshots, f"{lower.num_snapshots} demoted snapshots, not {num_snapshots}")


def _check_copy(copy: Copy, lower: LowerTier, *, is_arriving: bool) -> int:
    """Check a tier's snapshot, and return how many blocks it takes; one that arrives: none."""
    if not lower.is_queued(copy):
        raise _wrong_snapshot(copy, "is not in the queue")
    if copy.column is not lower.column:
        raise _wrong_snapshot(copy, "is in another tier")
    if not 0 < copy.saved_tokens <= copy.position:
        raise _wrong_snapshot(copy, f"is said to save {copy.saved_tokens} tokens")
    if is_arriving:
        if not copy.address == copy.tail_address == NO_ADDRESS:
            raise _wrong_snapshot(copy, "can be loaded before it is there")
        return 0
    if (copy.address != NO_ADDRESS) != lower.has_snapshots:
        raise _wrong_snapshot(copy, f"has address {copy.address}")
    has_tail = lower.has_snapshots and copy.position % BLOCK_TOKENS > 0
    if (copy.tail_address != NO_ADDRESS) != has_tail:
        raise _wrong_snapshot(copy, f"has tail {copy.tail_address}")
    return lower.snapshot_blocks(copy.position) + has_tail


def _check_blocks(run: Run, lower: LowerTier, expected: set[Block]) -> int:
    """Check where the blocks of a run are that a tier has, and return how many addresses it has for them.

    Args:
        expected: blocks that the tier will have.
    """
    is_elsewhere = is_on_device(run) and not lower.is_persistent
    addresses = lower.column.addresses_in(run)
    for own, address in enumerate(addresses):
        if address == NO_ADDRESS and (run, own) not in expected and not is_elsewhere:
            raise CacheInvariantError(
                f"the demoted block {run.start_block + own} is neither in the tier nor on the device"
            )
    return len(addresses) - addresses.count(NO_ADDRESS)


def _check_index(cache: Internals) -> None:
    asked = cache.index.asked
    if asked is not None:
        is_right = cache.index.find(*asked) == cache.rule.match(*asked)
        _require(is_right, "the index has changed, but the remembered lookup was kept")
