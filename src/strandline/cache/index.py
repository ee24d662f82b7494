"""The prefix index: one tree of cached runs per salt, and lookups in it."""

from array import array
from collections.abc import Callable, Iterable

from strandline.cache.last_lookup import LastLookup
from strandline.cache.lease import Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.resume import Match, ResumeRule
from strandline.cache.tree import Run, split
from strandline.cache.walk import Walk

MAX_EMPTY_ROOTS = 256


class PrefixIndex:
    """Looks up prompts in the trees."""

    def __init__(self, memory: CacheMemory, leases: Callable[[], Iterable[Lease]], rule: ResumeRule) -> None:
        self._memory = memory
        self._leases = leases
        self.roots: dict[str, Run] = {}
        """By salt; the newest last."""
        self.last = LastLookup[Run, Match](rule.match)
        self.new_root = new_root
        """Returns the root of a salt's tree, which tiers below the device may have."""

    def find(self, root: Run, data: bytearray) -> Match:
        """Return how far a tree matches ``data``, and where it resumes. Changes nothing."""
        return self.last.find(root, data, self._memory.revision)

    def match(self, salt: str, data: bytearray) -> Match | None:
        """Return how far a salt's tree matches ``data``; None: the salt has none. Changes nothing."""
        root = self.roots.get(salt)
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
