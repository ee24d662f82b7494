"""Rules for where prompts may resume: at snapshots, or at any token."""

from dataclasses import dataclass
from typing import ClassVar

from strandline.cache.resume import Match, ResumeRule
from strandline.cache.tree import Run, position_of
from strandline.cache.walk import Walk, deepest_snapshot, walk
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import Reason
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES, resumable_end
from strandline.specs import ModelSpec


@dataclass(frozen=True, slots=True)
class AtSnapshots:
    """For models that keep states: prompts resume at the deepest snapshot on their path."""

    needs_slots: ClassVar[bool] = True
    needs_snapshots: ClassVar[bool] = True

    def match(self, root: Run, data: bytearray) -> Match:
        walked = walk(root, data)
        end = _outside_pictures(walked, data)
        snapshot = deepest_snapshot(end, data)
        return Match(end, snapshot.position if snapshot else 0, snapshot, walked)

    def last(self, num_tokens: int) -> int:
        return num_tokens

    def resumes_at(self, data: bytearray, position: int) -> int:
        return position

    def without_copy(self, match: Match, upper: Run, data: bytearray) -> Match:
        """Return the match without its snapshot, which would need memory in addition to the request's own state."""
        return Match(Walk(upper, match.end.num_blocks, None, 0), 0, None, match.walked)

    def why_not_deeper(self, match: Match, data: bytearray) -> Reason:
        return Reason.SNAPSHOT_EVICTED if _lost_snapshot(match, data) else Reason.NO_SNAPSHOT


AT_SNAPSHOTS = AtSnapshots()


@dataclass(frozen=True, slots=True)
class AtTokens:
    """For models that keep no states: prompts resume at any token whose KV is cached, without slots.

    At least the last token is computed: its final hidden state, which the next token is sampled from, is not kept.
    """

    grid_tokens: int = 1
    """Prompts resume at multiples of this only."""

    needs_slots: ClassVar[bool] = False
    needs_snapshots: ClassVar[bool] = False

    def match(self, root: Run, data: bytearray) -> Match:
        walked = walk(root, data)
        end = _outside_pictures(walked, data)
        last = min(end.kv_tokens, self.last(len(data) // TOKEN_BYTES))
        return Match(end, resumable_end(data, last, self.grid_tokens), None, walked)

    def last(self, num_tokens: int) -> int:
        return max(num_tokens - 1, 0) // self.grid_tokens * self.grid_tokens

    def resumes_at(self, data: bytearray, position: int) -> int:
        return resumable_end(data, min(position, self.last(len(data) // TOKEN_BYTES)), self.grid_tokens)

    def without_copy(self, match: Match, upper: Run, data: bytearray) -> Match:
        """Return the match of whole blocks alone, which the request shares."""
        whole = Walk(upper, match.end.num_blocks, None, 0)
        last = min(whole.kv_tokens, self.last(len(data) // TOKEN_BYTES))
        return Match(whole, resumable_end(data, last, self.grid_tokens), None, match.walked)

    def why_not_deeper(self, match: Match, data: bytearray) -> Reason:
        return Reason.REPEATED


@dataclass(frozen=True, slots=True)
class AtWindowEnds:
    """For models that keep no states, with window blocks: prompts resume at snapshots, which are windows without slots.

    At least the last token is computed, as with ``AtTokens``. A window stores one token more than a layer reads, so
    that a prompt which ends at a snapshot resumes one token before it.
    """

    grid_tokens: int = 1
    """Prompts resume at multiples of this only."""

    needs_slots: ClassVar[bool] = False
    needs_snapshots: ClassVar[bool] = True

    def match(self, root: Run, data: bytearray) -> Match:
        walked = walk(root, data)
        end = _outside_pictures(walked, data)
        num_tokens = len(data) // TOKEN_BYTES
        last = resumable_end(data, self.last(num_tokens), self.grid_tokens)
        within = end
        if last < num_tokens - 1 and last < end.kv_tokens:
            within, data = _ending_at(end, last), data[: last * TOKEN_BYTES]
        snapshot = deepest_snapshot(within, data)
        return Match(end, min(snapshot.position, last) if snapshot else 0, snapshot, walked)

    def last(self, num_tokens: int) -> int:
        return max(num_tokens - 1, 0) // self.grid_tokens * self.grid_tokens

    def resumes_at(self, data: bytearray, position: int) -> int:
        num_tokens = len(data) // TOKEN_BYTES
        last = resumable_end(data, self.last(num_tokens), self.grid_tokens)
        return min(position, last) if position <= last or last == num_tokens - 1 else 0

    def without_copy(self, match: Match, upper: Run, data: bytearray) -> Match:
        """Return the match without its snapshot, whose window the request would need in addition to its own."""
        return AT_SNAPSHOTS.without_copy(match, upper, data)

    def why_not_deeper(self, match: Match, data: bytearray) -> Reason:
        if match.position == resumable_end(data, self.last(len(data) // TOKEN_BYTES), self.grid_tokens):
            return Reason.REPEATED
        return AT_SNAPSHOTS.why_not_deeper(match, data)


def resume_rule(spec: ModelSpec, *, grid_tokens: int = 1) -> ResumeRule:
    """Return the rule for a model.

    Args:
        grid_tokens: resume at multiples of this only, where the model keeps no states.
    """
    if spec.has_states:
        return AT_SNAPSHOTS
    return AtWindowEnds(grid_tokens) if spec.has_window_blocks else AtTokens(grid_tokens)


def _outside_pictures(end: Walk, data: bytearray) -> Walk:
    """Return a walk that ends strictly inside a picture as one that ends before it.

    The first tokens of two pictures may be the same by chance, and what the index holds may end inside a picture.
    """
    kv_tokens = end.kv_tokens
    position = resumable_end(data, kv_tokens)
    return end if position == kv_tokens else _ending_at(end, position)


def _ending_at(end: Walk, position: int) -> Walk:
    """Return a walk that ends at an earlier position."""
    num_blocks, num_partial = divmod(position, BLOCK_TOKENS)
    if num_blocks == end.num_blocks:
        return end._replace(partial_run=end.partial_run if num_partial else None, partial_tokens=num_partial)
    holder = next(run for run in end.run.ancestry() if run.start_block <= num_blocks)
    run = holder if holder.start_block < num_blocks or holder.parent is None else holder.parent
    return Walk(run, num_blocks, holder if num_partial else None, num_partial)


def _lost_snapshot(match: Match, data: bytearray) -> bool:
    """Return whether a snapshot deeper than the hit was evicted on the matched path."""
    for run in match.end.run.ancestry():
        for num_blocks, tail in run.evicted_snapshots:
            is_on_path = num_blocks <= match.end.num_blocks and data.startswith(tail, num_blocks * BLOCK_KEY_BYTES)
            if is_on_path and position_of((num_blocks, tail)) > match.position:
                return True
        if run.end_tokens <= match.position:
            return False
    return False
