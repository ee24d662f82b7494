"""Where a prompt may resume: at a snapshot if the model keeps states, else at any token whose KV is cached."""

from typing import NamedTuple, Protocol

from strandline.cache.tree import Run, Snapshot
from strandline.cache.walk import Walk
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import Reason


class Match(NamedTuple):
    """How far a tree matches a prompt, and where the prompt resumes."""

    end: Walk
    position: int
    """The tokens before it are hit."""
    snapshot: Snapshot | None
    """The snapshot that the prompt resumes from; None: nothing is hit, or prompts resume without snapshots."""
    walked: Walk
    """``end`` before it was moved up out of a picture: what the device really has, and what tiers have after it."""

    @property
    def copied_run(self) -> Run | None:
        """The run whose block a request copies in part, because it resumes inside that block; None: it does not."""
        return self.end.partial_run if self.position > self.end.num_blocks * BLOCK_TOKENS else None

    @property
    def source(self) -> Snapshot | Run | None:
        """What the request resumes from: the snapshot, or, without snapshots, the deepest run; None: nothing is hit."""
        if self.position == 0:
            return None
        return self.snapshot or self.copied_run or self.end.run


class ResumeRule(Protocol):
    """Finds where prompts resume."""

    @property
    def needs_slots(self) -> bool:
        """Whether running requests and hits need slots."""

    @property
    def needs_snapshots(self) -> bool:
        """Whether prompts resume at snapshots alone."""

    def match(self, root: Run, data: bytearray) -> Match:
        """Match a prompt against a tree. Changes nothing."""

    def last(self, num_tokens: int) -> int:
        """Return the deepest position at which a prompt of this many tokens could resume."""

    def resumes_at(self, data: bytearray, position: int) -> int:
        """Return where a prompt would resume if it were cached up to a position, with a snapshot there; 0: nowhere."""

    def without_copy(self, match: Match, upper: Run, data: bytearray) -> Match:
        """Return the deepest match that needs no memory but what is computed.

        Args:
            upper: the run that ends with the match's last whole block.
        """

    def why_not_deeper(self, match: Match, data: bytearray) -> Reason:
        """Return why tokens whose KV is cached are not hit."""
