"""An excerpt of the prefix tree for display, as plain records: runs, their snapshots and their users. Changes nothing.

Bounded in time and in size, so that it does not delay steps: of a large tree it contains the runs used last, found
from the root downwards by visiting at most ``MAX_VISITED_RUNS``.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from hashlib import blake2s
from itertools import islice
from typing import Final

from strandline.cache.core import PrefixCache
from strandline.cache.lease import Lease
from strandline.cache.tree import Run, Snapshot, children_with_prefix
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.records.excerpts import BEFORE_TOKENS, EXCERPT_TOKENS, excerpt
from strandline.records.tokens import TOKEN_BYTES, common_tokens
from strandline.records.tree_view import LeaseView, RunView, SnapshotView, TreeView

MAX_VISITED_RUNS: Final = 2048
"""Runs that are visited for one excerpt."""
MAX_SNAPSHOTS_PER_RUN: Final = 32
DIGEST_BYTES: Final = 6


def view(cache: PrefixCache, *, salt: str = "", max_runs: int = 400, key: bytes = b"") -> TreeView:
    """Return what is cached under a salt.

    Args:
        max_runs: most runs to include: those in use, then those used last.
        key: key of the digests, at most 32 bytes, which keeps their tokens from being guessed.
    """
    parts, stats = cache.internals(), cache.stats()
    roots, leases = parts.index.roots, parts.leases.values()
    root = roots.get(salt)
    excerpt = _TreeExcerpt(leases, key)
    if root is not None:
        excerpt.choose(root, max_runs)
    return TreeView(
        runs=tuple(excerpt.runs()),
        leases=tuple(excerpt.lease(lease) for lease in leases if lease.root is root),
        num_runs_left_out=excerpt.num_left_out,
        num_blocks=stats.memory.num_blocks,
        num_snapshots=stats.num_snapshots,
        num_other_salts=sum(bool(other.children) for other in roots.values() if other is not root),
    )


class _TreeExcerpt:
    """Collects an excerpt of one tree."""

    def __init__(self, leases: Iterable[Lease], key: bytes) -> None:
        self._key = key
        self._indices: dict[Run, int] = {}
        self._digests: dict[Run, bytes] = {}
        self._num_shown_below: dict[Run, int] = {}
        self._in_first_block: dict[Run, list[Snapshot]] = {}
        """By run: its parent's snapshots that only this run continues, which are shown with it."""
        self._num_snapshot_visits = MAX_VISITED_RUNS // 2
        self._now = 0
        self._readers: dict[Snapshot, list[RequestId]] = {}
        for lease in leases:
            if lease.source is not None:
                self._readers.setdefault(lease.source, []).append(lease.request_id)

    def choose(self, root: Run, max_runs: int) -> None:
        """Choose runs from the root downwards: those in use, then those used last."""
        num_visits, num_waiting = MAX_VISITED_RUNS, 0
        waiting: list[tuple[bool, int, int, Run]] = []
        run = root
        while True:
            self._show(run)
            # The newest children first; half of the visits are left for deeper runs.
            for child in islice(reversed(run.children.values()), max(num_visits // 2, 1)):
                num_visits -= 1
                num_waiting += 1
                heapq.heappush(waiting, (child.num_users == 0, -_last_tick(child), num_waiting, child))
            if not waiting or len(self._indices) == max_runs:
                return
            run = heapq.heappop(waiting)[3]

    def _show(self, run: Run) -> None:
        self._indices[run] = len(self._indices)
        self._num_shown_below[run] = 0
        if run.parent is not None:
            self._num_shown_below[run.parent] += 1
        self._now = max(self._now, _last_tick(run))

    @property
    def num_left_out(self) -> int:
        return sum(len(run.children) - num_shown for run, num_shown in self._num_shown_below.items())

    def runs(self) -> Iterator[RunView]:
        """Yield the chosen runs, parents before their children."""
        for run in self._indices:
            yield self._run(run, run.parent)

    def _run(self, run: Run, parent: Run | None) -> RunView:
        first = run.first_key
        above = self._digests[parent] if parent is not None else b""
        digest = self._digests[run] = blake2s(above + first, digest_size=DIGEST_BYTES, key=self._key).digest()
        parts_at = _common_with_siblings(run, parent, first)
        beginning = run.tokens[: (parts_at + EXCERPT_TOKENS) * TOKEN_BYTES]
        lead = b"" if parent is None else parent.tokens[-BEFORE_TOKENS * TOKEN_BYTES :]
        own_keys = run.keys[: run.num_own_snapshots]
        own = self._in_first_block.get(run, []) + [run.snapshots[key] for key in own_keys[-MAX_SNAPSHOTS_PER_RUN:]]
        num_snapshots = len(own) - min(len(own_keys), MAX_SNAPSHOTS_PER_RUN) + len(own_keys)
        shared, num_unvisited = self._assign_to_children(run)
        shown = sorted(own + shared, key=lambda snapshot: snapshot.position)[-MAX_SNAPSHOTS_PER_RUN:]
        start = run.start_block * BLOCK_TOKENS
        return RunView(
            parent=self._indices[parent] if parent is not None else None,
            start=start,
            end=run.end_tokens,
            num_blocks=len(run.blocks),
            digest=digest.hex(),
            parts_at=start + parts_at,
            head=excerpt(lead + beginning, len(lead) // TOKEN_BYTES + parts_at),
            age=self._now - _last_tick(run),
            num_users=run.num_users,
            snapshots=tuple(self._snapshot(snapshot) for snapshot in shown),
            num_snapshots_left_out=num_snapshots + len(shared) + num_unvisited - len(shown),
            num_children=len(run.children),
            num_children_left_out=len(run.children) - self._num_shown_below[run],
        )

    def _assign_to_children(self, run: Run) -> tuple[list[Snapshot], int]:
        """Assign the snapshots after a run's last block to the only child that continues them.

        Returns:
            Those that several children continue, and how many were not visited.
        """
        shared = []
        keys = run.keys[run.num_own_snapshots :]
        visited = keys[: self._num_snapshot_visits]
        self._num_snapshot_visits -= len(visited)
        for key in visited:
            continued_by = children_with_prefix(run, key[1])
            if len(continued_by) == 1:
                self._in_first_block.setdefault(continued_by[0], []).append(run.snapshots[key])
            else:
                shared.append(run.snapshots[key])
        return shared, len(keys) - len(visited)

    def _snapshot(self, snapshot: Snapshot) -> SnapshotView:
        readers = tuple(self._readers.get(snapshot, ()))
        return SnapshotView(snapshot.position, snapshot.kind, max(self._now - snapshot.last_tick, 0), readers)

    def lease(self, lease: Lease) -> LeaseView:
        index = self._indices.get(lease.run)
        return LeaseView(lease.request_id, index, len(lease.tokens), lease.computed, lease.account.hit)


def _last_tick(run: Run) -> int:
    """Return the number of a run's last use, including uses of its newest child."""
    newest = next(reversed(run.children.values()), None)
    return run.last_tick if newest is None else max(run.last_tick, newest.last_tick)


def _common_with_siblings(run: Run, parent: Run | None, first: bytes) -> int:
    """Return how many of a run's first tokens a sibling shares, which is a neighbour in the sorted order."""
    if parent is None or len(parent.child_keys) < 2:
        return 0
    index = bisect_left(parent.child_keys, first)
    neighbours = parent.child_keys[max(index - 1, 0) : index] + parent.child_keys[index + 1 : index + 2]
    return max(common_tokens(neighbour, first) for neighbour in neighbours)
