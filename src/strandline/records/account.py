"""The account of a lookup: how many tokens were hit, and why each of the others was not.

The reasons always add up: ``queried == hit + sum(miss.num_tokens)``.
"""

from enum import StrEnum
from typing import NamedTuple

from strandline.ids import RequestId


class SnapshotKind(StrEnum):
    """Why a snapshot was taken."""

    PROMPT_END = "prompt_end"
    GENERATION_END = "generation_end"
    BRANCH = "branch"
    """Where a prompt diverges from a cached or a running one."""
    MARK = "mark"
    """At a position that the sender or the chat template marked as the end of a shared prefix."""
    LADDER = "ladder"
    """Inside a prompt seen for the first time, at exponentially growing distances."""
    PROBE = "probe"
    """Inside a prompt seen for the first time, while memory is scarce: the one rung that it gets."""
    BOUNDARY = "boundary"
    """On a fixed grid, in the modes ``align`` and ``all``."""
    PREEMPTION = "preemption"
    """Where a request was preempted."""


class Reason(StrEnum):
    """Why a token had to be computed."""

    FIRST_SEEN = "first_seen"
    """No cached prompt shares a prefix with this one."""
    DIVERGED = "diverged"
    """The prompt diverges from every cached one here."""
    NO_SNAPSHOT = "no_snapshot"
    """Its keys and values are cached, but there is no snapshot at or after it."""
    SNAPSHOT_EVICTED = "snapshot_evicted"
    """As ``NO_SNAPSHOT``, because the snapshot has been evicted."""
    EVICTED = "evicted"
    """It was cached and has been evicted."""
    REPEATED = "repeated"
    """Its keys and values are cached, but it is computed again, in a model that keeps no states: the last token of a
    prompt, to sample what follows it; in deterministic mode, all tokens of that block."""
    COMPUTING = "computing"
    """A running request is computing it."""
    LOADING = "loading"
    """It is being loaded from a store."""
    DEMOTED = "demoted"
    """A tier below the device has it: computing is faster than loading, or there was no memory to load it into."""
    LOAD_FAILED = "load_failed"
    """A store or another engine had it, but loading it failed, or there was no memory for it."""
    OTHER_SALT = "other_salt"
    """It is cached under another salt."""
    NO_ROOM = "no_room"
    """It is cached, but there is not enough memory for it and the request's own data, and no request to free some."""
    NOT_ASKED = "not_asked"
    """The request does not read the cache, or caching is disabled."""


class Miss(NamedTuple):
    """A half-open token range ``[start, end)`` that had to be computed, and why."""

    reason: Reason
    start: int
    end: int
    request_id: RequestId | None = None
    """With ``COMPUTING``: the request that computes it."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class Account(NamedTuple):
    """What one lookup found."""

    queried: int
    """Tokens in the prompt."""
    hit: int
    """Tokens that are not computed: the position that the request resumes from."""
    kv_tokens: int
    """Tokens whose keys and values are cached, which may be more than ``hit``."""
    snapshot_kind: SnapshotKind | None
    misses: tuple[Miss, ...]
    num_remembered: int = 0
    """Tokens that are encoded as earlier answers were generated; hit or not."""

    @classmethod
    def not_asked(cls, num_tokens: int) -> "Account":
        """Return the account of a request that does not read the cache."""
        misses = (Miss(Reason.NOT_ASKED, 0, num_tokens),) if num_tokens else ()
        return cls(num_tokens, 0, 0, None, misses)

    def without_room(self, hit: int) -> "Account":
        """Return the account of a request that can use only ``hit`` of the tokens that it found, for lack of memory."""
        miss = Miss(Reason.NO_ROOM, hit, self.hit)
        return self._replace(hit=hit, snapshot_kind=None, misses=(miss, *self.misses))

    def blaming(self, reason: Reason, end: int) -> "Account":
        """Return the account with this reason for all misses before ``end``."""
        end = min(end, self.queried)
        if end <= self.hit:
            return self
        others = [miss._replace(start=max(miss.start, end)) for miss in self.misses if miss.end > end]
        return self._replace(misses=(Miss(reason, self.hit, end), *others))

    def for_callers(self) -> "Account":
        """Return the account without what it reveals of other salts, for the request's sender.

        Tokens cached under another salt are reported as never seen, in one range with those that follow: a separate
        range would reveal its end.
        """
        for index, miss in enumerate(self.misses):
            if miss.reason is Reason.OTHER_SALT:
                reason = Reason.DIVERGED if miss.start else Reason.FIRST_SEEN
                cut = Miss(reason, miss.start, self.misses[-1].end)
                return self._replace(misses=(*self.misses[:index], cut))
        return self


UNCOUNTED = Account(0, 0, 0, None, ())
"""The account of a request that is not counted, such as an audit."""
