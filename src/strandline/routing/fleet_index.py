"""What each of many replicas can resume, as their events say, in one index that all replicas share.

A path that several replicas hold is stored once, with a bit per replica, so that finding a prompt's hits takes as long
for 512 replicas as for one.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from itertools import chain, compress, groupby

from strandline.events.resumable import PromptHashes
from strandline.events.wire import BLOCK_GROUP, SNAPSHOT_GROUP, BlockRemoved, BlockStored, WireEvent
from strandline.ids import BLOCK_TOKENS


@dataclass(slots=True)
class _Held:
    """What one replica holds, by hash."""

    blocks: set[int] = field(default_factory=set)
    snapshots: set[int] = field(default_factory=set)


class FleetIndex:
    """The blocks and snapshots that the events of replicas have announced.

    Replicas have small numbers, which become bits of masks. As in ``ResumableIndex``, a replica that announces blocks
    without snapshots has a model without states.
    """

    def __init__(self) -> None:
        self.replicas = 0
        """The mask of all replicas."""
        self._held: dict[int, _Held] = {}
        self._blocks: dict[int, int] = {}
        """By hash: the replicas that hold it."""
        self._snapshots: dict[int, int] = {}
        self._homes: dict[int, tuple[int | None, int]] = {}
        """For each snapshot, the hash before its last block and the number of tokens from there."""
        self._rests: dict[int | None, dict[int, int]] = {}
        """By hash before a last block: numbers of tokens from there, each with its number of snapshots."""
        self._stateless = 0
        """Replicas that hold no snapshots."""

    @property
    def num_blocks(self) -> int:
        """Return the number of different blocks."""
        return len(self._blocks)

    @property
    def num_snapshots(self) -> int:
        """Return the number of different snapshots."""
        return len(self._snapshots)

    def num_held(self, replica: int) -> int:
        """Return the number of blocks that a replica has announced."""
        return len(self._held[replica].blocks)

    def add(self, replica: int) -> None:
        """Add a replica that holds nothing."""
        self.replicas |= 1 << replica
        self._held[replica] = _Held()
        self._stateless |= 1 << replica

    def remove(self, replica: int) -> None:
        """Forget a replica."""
        self.clear(replica)
        del self._held[replica]
        self.replicas &= ~(1 << replica)
        self._stateless &= ~(1 << replica)

    def clear(self, replica: int) -> None:
        """Forget what a replica holds."""
        held = self._held[replica]
        self._remove_blocks(replica, held.blocks)
        self._remove_snapshots(replica, held.snapshots)
        self.add(replica)

    def apply(self, replica: int, event: WireEvent) -> None:
        """Record an event of a replica. Groups of other kinds are ignored."""
        match event:
            case BlockStored(group_idx=group, block_hashes=hashes) if group == BLOCK_GROUP:
                bit = 1 << replica
                self._held[replica].blocks.update(hashes)
                for key in hashes:
                    self._blocks[key] = self._blocks.get(key, 0) | bit
            case BlockStored(group_idx=group, block_hashes=[key]) if group == SNAPSHOT_GROUP:
                self._add_snapshot(replica, key, event.parent_block_hash, event.block_size)
            case BlockRemoved(group_idx=group, block_hashes=hashes) if group == BLOCK_GROUP:
                held = self._held[replica].blocks
                self._remove_blocks(replica, held.intersection(hashes))
                held.difference_update(hashes)
            case BlockRemoved(group_idx=group, block_hashes=hashes) if group == SNAPSHOT_GROUP:
                snapshots = self._held[replica].snapshots
                self._remove_snapshots(replica, snapshots.intersection(hashes))
                snapshots.difference_update(hashes)
                if not snapshots:
                    self._stateless |= 1 << replica
            case BlockStored() | BlockRemoved():
                pass
            case _:
                self.clear(replica)

    def hits(self, prompt: PromptHashes) -> Iterator[tuple[int, int]]:
        """Yield numbers of tokens and masks of the replicas that would hit them, the deepest hits first.

        No replica is in two masks; those that would hit nothing are in none. Take what is yielded before the index
        changes.
        """
        unseen = self.replicas & ~self._stateless
        depths = range(self._matched_blocks(prompt), -1, -1)
        hashes = chain(reversed(prompt.blocks[: depths.start]), (None,))
        has_snapshots = compress(depths, map(self._rests.__contains__, hashes))
        stateless = dict(self._depths(prompt, self._stateless))
        for num_before, _ in groupby(merge(has_snapshots, stateless, reverse=True)):
            before = prompt.blocks[num_before - 1] if num_before else None
            # A replica that has a snapshot has the blocks before it.
            if before is None or self._blocks[before] & unseen:
                for num_hit, mask in self._snapshot_hits(prompt, num_before, self._rests.get(before, {})):
                    if mask & unseen:
                        yield num_hit, mask & unseen
                        unseen &= ~mask
            if num_before in stateless:
                yield min(num_before * BLOCK_TOKENS, prompt.num_tokens - 1), stateless[num_before]

    def _snapshot_hits(
        self, prompt: PromptHashes, num_before: int, rests: Mapping[int, int]
    ) -> Iterator[tuple[int, int]]:
        """Yield the hits at snapshots whose last block comes after the first ``num_before`` ones."""
        for num_rest in sorted(rests, reverse=True):
            num_hit = num_before * BLOCK_TOKENS + num_rest
            if num_hit <= prompt.num_tokens:
                yield num_hit, self._snapshots.get(prompt.snapshot(num_before, num_rest), 0)

    def shared_prefixes(self, prompt: PromptHashes) -> Iterator[tuple[int, int]]:
        """Yield numbers of tokens and masks of the replicas that have announced these, the most tokens first.

        No replica is in two masks; those that have announced no block of the prompt are in none.
        """
        for num_blocks, mask in self._depths(prompt, self.replicas):
            yield num_blocks * BLOCK_TOKENS, mask

    def _depths(self, prompt: PromptHashes, replicas: int) -> Iterator[tuple[int, int]]:
        """Yield numbers of first blocks of a prompt, and masks of the replicas that have announced them; most first.

        Replicas that are not in the given mask are left out. Depths are found by bisection: a replica that has
        announced a block has announced those before it.
        """
        left, num_blocks = replicas, len(prompt.blocks)
        while num_blocks := bisect_left(prompt.blocks, True, hi=num_blocks, key=partial(self._is_missing, left)):
            mask = self._blocks[prompt.blocks[num_blocks - 1]] & left
            yield num_blocks, mask
            left &= ~mask

    def _is_missing(self, replicas: int, block: int) -> bool:
        """Return whether none of some replicas has announced a block."""
        return not self._blocks.get(block, 0) & replicas

    def _matched_blocks(self, prompt: PromptHashes) -> int:
        """Return how many of the prompt's first blocks any replica has announced."""
        return bisect_left(prompt.blocks, True, key=lambda block: block not in self._blocks)

    def _add_snapshot(self, replica: int, key: int, before: int | None, num_rest: int) -> None:
        if key not in self._snapshots:
            self._homes[key] = before, num_rest
            rests = self._rests.setdefault(before, {})
            rests[num_rest] = rests.get(num_rest, 0) + 1
        self._snapshots[key] = self._snapshots.get(key, 0) | 1 << replica
        self._held[replica].snapshots.add(key)
        self._stateless &= ~(1 << replica)

    def _remove_blocks(self, replica: int, hashes: set[int]) -> None:
        bit = 1 << replica
        for key in hashes:
            self._blocks[key] &= ~bit
            if not self._blocks[key]:
                del self._blocks[key]

    def _remove_snapshots(self, replica: int, hashes: set[int]) -> None:
        bit = 1 << replica
        for key in hashes:
            self._snapshots[key] &= ~bit
            if self._snapshots[key]:
                continue
            del self._snapshots[key]
            before, num_rest = self._homes.pop(key)
            rests = self._rests[before]
            rests[num_rest] -= 1
            if not rests[num_rest]:
                del rests[num_rest]
            if not rests:
                del self._rests[before]
