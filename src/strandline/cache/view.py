"""What the cache holds, as plain records for people: runs, snapshots on them, and who uses them. Changes nothing.

Bounded in time as in size: of a large tree the runs used last are shown, found from the root downwards without
looking at more than ``MAX_LOOKS`` of them, so that a look does not hold up the steps.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2s
from itertools import islice
from typing import Final

from strandline.cache.account import SnapshotKind
from strandline.cache.core import PrefixCache
from strandline.cache.lease import Lease
from strandline.cache.tokens import TOKEN_BYTES, common_tokens, decode
from strandline.cache.tree import Run, Snapshot
from strandline.ids import BLOCK_TOKENS, RequestId

MAX_LOOKS: Final = 2048
"""Runs that one look at the tree may touch."""
MAX_SNAPSHOTS_PER_RUN: Final = 32
HEAD_TOKENS: Final = 24
DIGEST_BYTES: Final = 6


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """A snapshot."""

    position: int
    kind: SnapshotKind
    age: int
    """How long ago it was used, counted in uses of anything."""
    readers: tuple[RequestId, ...]
    """Requests that are about to resume from it, or have just left it: it cannot be evicted."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A stretch of tokens without a branch."""

    parent: int | None
    """Place of the run above in the list, which comes before this one; None for the root, which has no tokens."""
    start: int
    end: int
    """Tokens ``[start, end)`` of the prompts that go through it."""
    num_blocks: int
    digest: str
    """Names the path to the run."""
    parts_at: int
    """Where it begins to differ from its siblings."""
    head: tuple[int, ...]
    """The tokens from there on, a few."""
    age: int
    num_users: int
    """Running requests whose path goes through it."""
    snapshots: tuple[SnapshotView, ...]
    """By position; of many, the deepest. Those beyond ``end`` lie inside the block in which its children part."""
    num_snapshots_left_out: int
    num_children: int
    num_children_left_out: int


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A running request."""

    request_id: RequestId
    run: int | None
    """Place in the list of the deepest run on its path; None when that is left out."""
    num_tokens: int
    computed: int
    hit: int


@dataclass(frozen=True, slots=True)
class TreeView:
    """The tree of one salt, and what is held altogether."""

    runs: tuple[RunView, ...]
    leases: tuple[LeaseView, ...]
    num_runs_left_out: int
    """At least so many: children of what is shown. Theirs in turn are not counted."""
    num_blocks: int
    """Handed out, under whatever salt."""
    num_snapshots: int
    """Under whatever salt."""
    num_other_salts: int
    """Under which something is cached too."""


def view(cache: PrefixCache, *, salt: str = "", max_runs: int = 400, key: bytes = b"") -> TreeView:
    """Return what is cached under a salt.

    Args:
        max_runs: show so many runs: those in use, then those used last.
        key: of the digests, at most 32 bytes. Without it nobody can find by trying what was digested.
    """
    parts, stats = cache.internals(), cache.stats()
    roots, leases = parts.index.roots, parts.leases.values()
    root = roots.get(salt)
    look = _Look(leases, key)
    if root is not None:
        look.at(root, max_runs)
    return TreeView(
        runs=tuple(look.runs()),
        leases=tuple(look.lease(lease) for lease in leases if lease.root is root),
        num_runs_left_out=look.num_left_out,
        num_blocks=stats.memory.num_blocks,
        num_snapshots=stats.num_snapshots,
        num_other_salts=sum(bool(other.children) for other in roots.values() if other is not root),
    )


class _Look:
    """One look at one tree."""

    def __init__(self, leases: Iterable[Lease], key: bytes) -> None:
        self._key = key
        self._places: dict[Run, int] = {}
        self._digests: dict[Run, bytes] = {}
        self._num_shown_below: dict[Run, int] = {}
        self._stubs_on: dict[Run, list[Snapshot]] = {}
        """Stubs that only one child continues, by that child: people look for them there."""
        self._num_stub_looks = MAX_LOOKS // 2
        self._now = 0
        self._readers: dict[Snapshot, list[RequestId]] = {}
        for lease in leases:
            if lease.source is not None:
                self._readers.setdefault(lease.source, []).append(lease.request_id)

    def at(self, root: Run, max_runs: int) -> None:
        """Choose what to show, from the root downwards: what is in use, then what was used last."""
        num_looks, num_waiting = MAX_LOOKS, 0
        waiting: list[tuple[bool, int, int, Run]] = []
        run = root
        while True:
            self._show(run)
            # The newest children come first; half of the looks stay for what lies deeper.
            for child in islice(reversed(run.children.values()), max(num_looks // 2, 1)):
                num_looks -= 1
                num_waiting += 1
                heapq.heappush(waiting, (child.num_users == 0, -_last_tick(child), num_waiting, child))
            if not waiting or len(self._places) == max_runs:
                return
            run = heapq.heappop(waiting)[3]

    def _show(self, run: Run) -> None:
        self._places[run] = len(self._places)
        self._num_shown_below[run] = 0
        if run.parent is not None:
            self._num_shown_below[run.parent] += 1
        self._now = max(self._now, _last_tick(run))

    @property
    def num_left_out(self) -> int:
        return sum(len(run.children) - num_shown for run, num_shown in self._num_shown_below.items())

    def runs(self) -> Iterator[RunView]:
        """Yield what was chosen; parents come before their children."""
        for run in self._places:
            yield self._run(run, run.parent)

    def _run(self, run: Run, parent: Run | None) -> RunView:
        first = run.first_key
        above = self._digests[parent] if parent is not None else b""
        digest = self._digests[run] = blake2s(above + first, digest_size=DIGEST_BYTES, key=self._key).digest()
        parts_at = _common_with_siblings(run, parent, first)
        head = run.tokens[parts_at * TOKEN_BYTES : (parts_at + HEAD_TOKENS) * TOKEN_BYTES]
        own = self._stubs_on.get(run, []) + [run.snapshots[p] for p in run.positions[-MAX_SNAPSHOTS_PER_RUN:]]
        num_snapshots = len(own) - min(len(run.positions), MAX_SNAPSHOTS_PER_RUN) + len(run.positions)
        shared, num_unseen = self._share_out_stubs(run)
        shown = sorted(own + shared, key=lambda snapshot: snapshot.position)[-MAX_SNAPSHOTS_PER_RUN:]
        start = run.start_block * BLOCK_TOKENS
        return RunView(
            parent=self._places[parent] if parent is not None else None,
            start=start,
            end=run.end_tokens,
            num_blocks=len(run.blocks),
            digest=digest.hex(),
            parts_at=start + parts_at,
            head=tuple(decode(head)),
            age=self._now - _last_tick(run),
            num_users=run.num_users,
            snapshots=tuple(self._snapshot(snapshot) for snapshot in shown),
            num_snapshots_left_out=num_snapshots + len(shared) + num_unseen - len(shown),
            num_children=len(run.children),
            num_children_left_out=len(run.children) - self._num_shown_below[run],
        )

    def _share_out_stubs(self, run: Run) -> tuple[list[Snapshot], int]:
        """Keep for each child the stubs that it alone continues; return the others, and how many were not looked at."""
        shared = []
        looked_at = list(islice(reversed(run.stubs.items()), self._num_stub_looks))
        self._num_stub_looks -= len(looked_at)
        for key, stub in looked_at:
            place = bisect_left(run.order, key)
            continued_by = [child for child in run.order[place : place + 2] if child.startswith(key)]
            if len(continued_by) == 1:
                self._stubs_on.setdefault(run.children[continued_by[0]], []).append(stub)
            else:
                shared.append(stub)
        return shared, len(run.stubs) - len(looked_at)

    def _snapshot(self, snapshot: Snapshot) -> SnapshotView:
        readers = tuple(self._readers.get(snapshot, ()))
        return SnapshotView(snapshot.position, snapshot.kind, max(self._now - snapshot.last_tick, 0), readers)

    def lease(self, lease: Lease) -> LeaseView:
        place = self._places.get(lease.run)
        return LeaseView(lease.request_id, place, len(lease.tokens), lease.computed, lease.account.hit)


def _last_tick(run: Run) -> int:
    """Return when a run was last used; of one with children, as far as the newest of them tells."""
    newest = next(reversed(run.children.values()), None)
    return run.last_tick if newest is None else max(run.last_tick, newest.last_tick)


def _common_with_siblings(run: Run, parent: Run | None, first: bytes) -> int:
    """Return how many of a run's first tokens some sibling shares. In the sorted order that is a neighbour."""
    if parent is None or len(parent.order) < 2:
        return 0
    place = bisect_left(parent.order, first)
    neighbours = parent.order[max(place - 1, 0) : place] + parent.order[place + 1 : place + 2]
    return max(common_tokens(neighbour, first) for neighbour in neighbours)
