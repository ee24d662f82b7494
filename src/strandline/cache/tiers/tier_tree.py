"""What tiers below the device have of the prefix index: blocks and snapshots, by their tokens.

A *demoted* snapshot is one that the device has evicted, with those blocks on its path that the device has evicted too.
A block is in the tree (``cache/tree.py``) once, whichever memories have it. A tier *has* each whole block on the path
of a snapshot that it stores, and no others: of a run, the first ones. For each tier, ``Run.stored`` has the addresses
of these in the tier's store. One without an address is on the device, if the tier is the first, or is being written. A
block that neither the device nor a tier has is removed, unless a move under way pins it. The block that contains a
snapshot's position is stored with the snapshot.
"""

from array import array
from bisect import insort
from hashlib import blake2b

from strandline.cache.announcing.announcer import Announcer
from strandline.cache.index import MAX_EMPTY_ROOTS, PrefixIndex
from strandline.cache.memory import CacheMemory
from strandline.cache.tiers.stored import (
    Column,
    StoredRun,
    TierSnapshot,
    cut_demoted,
    cut_off,
    demoted_run,
    find_key,
    stored_for,
)
from strandline.cache.traversal import demoted_after, is_on_device, stored_keys
from strandline.cache.tree import Run
from strandline.cache.walk import PathEnd, Walk, descend, descend_below
from strandline.ids import NULL_BLOCK
from strandline.records.tokens import BLOCK_KEY_BYTES


class TierTree:
    """What tiers have of the trees of all salts.

    Args:
        num_tiers: tiers below the device.
        key: secret for hashing salts, where files outlive the process.
        index: that of the device.
        memory: that of the device.
        announcer: collects events; None: they are off.
    """

    def __init__(
        self,
        num_tiers: int,
        key: bytes | None,
        index: PrefixIndex,
        memory: CacheMemory,
        announcer: Announcer | None = None,
    ) -> None:
        self.roots: dict[str, Run] = {}
        """By name (``name``)."""
        self.columns = tuple(Column(number) for number in range(num_tiers))
        self.epoch = ""
        """Begins the names of trees; "": until the first reset of the process."""
        self._key = key
        self._index = index
        self._memory = memory
        self._announcer = announcer
        self._unknown: dict[Run, str] = {}
        """By root: the names of the trees whose salts no request has had yet, or will have."""
        index.new_root, index.stored_root = self._root_of, self._stored_root

    def name(self, salt: str) -> str:
        """Return the name of a salt's tree: epoch and salt or, where files outlive the process, a hash of both."""
        named = self.epoch + salt
        if self._key is None:
            return named
        return blake2b(named.encode(errors="surrogatepass"), key=self._key, digest_size=16).hexdigest()

    def begin_epoch(self, epoch: str) -> None:
        """Have further requests find other trees than those that there are, which keep their names.

        Args:
            epoch: a name that no other one has had.
        """
        self._unknown = {root: tree for tree, root in self.roots.items()}
        self.epoch = epoch

    def root(self, tree: str) -> Run:
        """Return the root of a tree; create it if needed."""
        root = self.roots.get(tree)
        if root is None:
            root = self.roots[tree] = Run(None, 0, b"", array("i"))
            if tree != self.name(""):
                self._unknown[root] = tree
        return root

    def name_of(self, run: Run) -> str:
        """Return the name of the tree that a run is in."""
        *_, root = run.ancestry()
        return self._unknown.get(root) or self.name(root.salt)

    def _root_of(self, salt: str) -> Run:
        """Return the root of a salt's tree, which is known from now on."""
        if len(self.roots) >= 2 * MAX_EMPTY_ROOTS:
            in_use = {id(root) for root in self._index.roots.values()}
            self.roots = {n: r for n, r in self.roots.items() if id(r) in in_use or demoted_after(r) or stored_keys(r)}
            self._unknown = {root: tree for root, tree in self._unknown.items() if tree in self.roots}
        root = self.root(self.name(salt))
        if self._unknown.pop(root, None) is not None:
            root.salt = salt
            if self._announcer is not None:
                self._announcer.add_root(root)
        return root

    def _stored_root(self, salt: str) -> Run | None:
        return self.roots.get(self.name(salt))

    def known_roots(self) -> tuple[Run, ...]:
        """Return the roots of the trees whose salts are known."""
        return tuple(root for root in self.roots.values() if root not in self._unknown)

    def stored(self, run: Run) -> StoredRun:
        """Return what the tiers have of a run; enter that they will have something, if they have not."""
        return stored_for(run, len(self.columns))

    def find(self, tree: str, data: bytes | bytearray, num_blocks: int) -> PathEnd | None:
        """Return the end of a path of ``num_blocks`` blocks of encoded tokens, or None if not all of it is there."""
        root = self.roots.get(tree)
        end = None if root is None else descend_below(*descend(root, data, num_blocks), data, num_blocks)
        return end if end is not None and end.depth == num_blocks else None

    def grow(self, tree: str, data: bytes, num_blocks: int) -> Run:
        """Return the run that has the last block of a path; add the blocks that are not there."""
        run, depth = descend_below(*descend(self.root(tree), data, num_blocks), data, num_blocks)
        if depth == num_blocks:
            return run
        return self._grow(run, depth, data[depth * BLOCK_KEY_BYTES : num_blocks * BLOCK_KEY_BYTES])

    def attach(self, snapshot: TierSnapshot) -> TierSnapshot:
        """Add a snapshot to its run, unless one with its key is there; return the one that is there now."""
        *_, root = (run := snapshot.home).ancestry()
        stored = self.stored(run)
        found = stored.snapshots.get(snapshot.key)
        if found is not None:
            return found
        stored.snapshots[snapshot.key] = snapshot
        insort(stored.keys, snapshot.key)
        snapshot.copies = [None] * len(self.columns)
        if self._announcer is not None and root not in self._unknown:
            self._announcer.store(run, snapshot.key, root.salt)
        return snapshot

    def _grow(self, run: Run, depth: int, tokens: bytes) -> Run:
        """Add blocks after the one of a run at a depth: to the run itself if nothing else continues it."""
        self._memory.revision += 1
        if run.start_block < depth < run.end_block:
            if is_on_device(run):
                run = self._index.split_at(Walk(run, depth, None, 0))
            else:
                cut_demoted(run, depth - run.start_block)
        if is_on_device(run) or demoted_after(run):
            child = demoted_run(run, depth, tokens)
            self.stored(run).demoted[child.first_key] = child
            return child
        run.append(tokens, array("i", [NULL_BLOCK]) * (len(tokens) // BLOCK_KEY_BYTES))
        return run

    def pin(self, snapshot: TierSnapshot) -> None:
        """Keep a snapshot in the tree, with the blocks before it, until ``unpin``."""
        snapshot.num_pins += 1

    def unpin(self, snapshot: TierSnapshot) -> None:
        """Remove a snapshot if neither a tier has it nor another pin keeps it."""
        snapshot.num_pins -= 1
        self.detach(snapshot)

    def detach(self, snapshot: TierSnapshot) -> None:
        """Remove a snapshot from the tree, with the blocks that nothing else needs, unless it is used."""
        run, stored = snapshot.home, self.stored(snapshot.home)
        *_, root = run.ancestry()
        if snapshot.is_used or stored.snapshots.get(snapshot.key) is not snapshot:
            return
        del stored.snapshots[snapshot.key], stored.keys[find_key(run, *snapshot.key)]
        if self._announcer is not None and root not in self._unknown:
            self._announcer.remove(run, snapshot.key)
        self.trim(run)

    def leave_below(self, run: Run, kept: int) -> None:
        """Keep in the tree what tiers need of a run after its first ``kept`` blocks, which the device is to lose."""
        last = max((num_blocks for num_blocks, _ in stored_keys(run)[-1:]), default=0)
        last = run.end_block if demoted_after(run) else last
        if last <= run.start_block + kept:
            return
        lower = cut_off(run, kept)
        if self._announcer is not None:
            self._announcer.remove_blocks(lower, last - lower.start_block)
        self.trim(lower)
        if len(demoted := demoted_after(lower)) == 1:
            (child,) = demoted.values()
            self.stored(lower).join(lower, child)
            lower.append(bytes(child.tokens), child.blocks)

    def trim(self, run: Run) -> None:
        """Remove the blocks of a path after which nothing comes, if the device does not have them."""
        self._memory.revision += 1
        while (parent := run.parent) is not None and not is_on_device(run) and not demoted_after(run):
            keys = stored_keys(run)
            count = keys[-1][0] - run.start_block if keys else 0
            if not count:
                del self.stored(parent).demoted[run.first_key]
                run.parent = None
            del run.blocks[count:], run.hashes[count:], run.tokens[count * BLOCK_KEY_BYTES :]
            if count:
                break
            run = parent
