"""The prefix index: one tree of cached runs per salt, and lookups in it.

The last lookup is remembered until the index changes: a request is looked up to rank it in the queue, to find a leader,
to find what tiers have of it, and when it is admitted. Comparing all its tokens each time would cost more than all else
in its admission.
"""

from array import array
from collections.abc import Callable, Iterable

from strandline.cache.lease import Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.resume import Match, ResumeRule
from strandline.cache.tree import Run
from strandline.cache.tree_changes import split
from strandline.cache.walk import Walk

MAX_EMPTY_ROOTS = 256


class PrefixIndex:
    """Looks up prompts in the trees."""

    def __init__(self, memory: CacheMemory, leases: Callable[[], Iterable[Lease]], rule: ResumeRule) -> None:
        self._memory = memory
        self._leases = leases
        self._rule = rule
        self.roots: dict[str, Run] = {}
        """By salt; the newest last."""
        self.asked: tuple[Run, bytearray] | None = None
        """The root and the prompt of the last lookup. A prompt only grows."""
        self._valid_for: tuple[int, int] | None = None
        """Revision of the trees and length of that prompt for which the match holds."""
        self._match: Match
        self.new_root = new_root
        """Returns the root of a salt's tree, which tiers below the device may have."""
        self.stored_root: Callable[[str], Run | None] = lambda _: None
        """Returns the root that tiers have for a salt, or None. Changes nothing."""

    def find(self, root: Run, data: bytearray) -> Match:
        """Return how far a tree matches ``data``, and where it resumes. Changes nothing."""
        valid_for, asked = (self._memory.revision, len(data)), self.asked
        if asked is None or asked[0] is not root or asked[1] is not data or self._valid_for != valid_for:
            self._match = self._rule.match(root, data)
            self.asked, self._valid_for = (root, data), valid_for
        return self._match

    def match(self, salt: str, data: bytearray) -> Match | None:
        """Return how far a salt's tree matches ``data``; None: the salt has none. Changes nothing."""
        root = self.roots.get(salt) or self.stored_root(salt)
        return None if root is None else self.find(root, data)

    def root(self, salt: str) -> Run:
        """Return the root of a salt's tree; create it if needed."""
        root = self.roots.get(salt)
        if root is None:
            if len(self.roots) >= MAX_EMPTY_ROOTS:
                in_use = {id(lease.root) for lease in self._leases()}
                self.roots = {n: r for n, r in self.roots.items() if r.children or id(r) in in_use}
            root = self.roots[salt] = self.new_root(salt)
        return root

    def split_at(self, end: Walk) -> Run:
        """Split the run that a walk ends inside of; return the run that ends where the walk does."""
        if end.num_blocks in (end.run.end_block, 0):
            return end.run
        upper = split(end.run, end.num_blocks)
        self._memory.own(upper, upper.blocks)
        return upper


def new_root(salt: str) -> Run:
    """Return the root of a new tree."""
    root = Run(None, 0, b"", array("i"))
    root.salt = salt
    return root
