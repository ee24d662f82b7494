"""Where prompts may resume in models that keep no states, and in those whose attention all has windows."""

from dataclasses import dataclass
from typing import ClassVar

from strandline.cache.resume import AT_SNAPSHOTS, Match, ResumeRule, first_block_seen
from strandline.cache.tree import Run, first_gap, held_child
from strandline.cache.walk import Walk, walk
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import Reason
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES
from strandline.specs import ModelSpec


@dataclass(frozen=True, slots=True)
class AtTokens:
    """For models that keep no states: prompts resume at any token whose KV is cached, without slots.

    At least the last token is computed: its final hidden state, which the next token is sampled from, is not kept.
    """

    grid_tokens: int = 1
    """Prompts resume at multiples of this only."""

    needs_slots: ClassVar[bool] = False
    window_tokens: ClassVar[int | None] = None

    def match(self, root: Run, data: bytearray) -> Match:
        end = walk(root, data)
        cached = end.kv_tokens // self.grid_tokens * self.grid_tokens
        return Match(end, min(cached, self.last(len(data) // TOKEN_BYTES)), None)

    def last(self, num_tokens: int) -> int:
        return max(num_tokens - 1, 0) // self.grid_tokens * self.grid_tokens

    def without_copy(self, match: Match, upper: Run, num_tokens: int) -> Match:
        """Return the match of whole blocks alone, which the request shares."""
        whole = Walk(upper, match.end.num_blocks, None, 0)
        return Match(whole, min(whole.kv_tokens, self.last(num_tokens)), None)

    def why_not_deeper(self, match: Match, data: bytearray) -> Reason:
        return Reason.REPEATED


@dataclass(frozen=True, slots=True)
class BehindWindows:
    """For models that keep states and whose attention all has windows: ``Windows`` frees what lies behind them.

    All blocks that a snapshot needs are held. A request shares those from its window on, up to the first gap.
    """

    window_tokens: int
    """Tokens that a token sees, itself among them: the most of any layer."""

    needs_slots: ClassVar[bool] = True

    def match(self, root: Run, data: bytearray) -> Match:
        found = AT_SNAPSHOTS.match(root, data)
        shared, position = found.end, found.position
        gap = first_gap(shared.run, shared.num_blocks, first_block_seen(position, self.window_tokens))
        if gap < shared.num_blocks:
            run = next(run for run in shared.run.ancestry() if run.start_block < gap or run.parent is None)
            shared = Walk(run, gap, None, 0)
        if position > shared.num_blocks * BLOCK_TOKENS and shared.num_blocks == shared.run.end_block:
            # A stub: any child that begins with its tokens may hold them.
            stub_key = bytes(data[shared.num_blocks * BLOCK_KEY_BYTES : position * TOKEN_BYTES])
            shared = shared._replace(partial_run=held_child(shared.run, stub_key))
        return found if shared is found.end else found._replace(held=shared)

    def last(self, num_tokens: int) -> int:
        return num_tokens

    def without_copy(self, match: Match, upper: Run, num_tokens: int) -> Match:
        """Return a match of nothing: what the match shares begins at its window."""
        return Match(match.end, 0, None, Walk(list(upper.ancestry())[-1], 0, None, 0))

    def why_not_deeper(self, match: Match, data: bytearray) -> Reason:
        return AT_SNAPSHOTS.why_not_deeper(match, data)


def resume_rule(spec: ModelSpec, *, grid_tokens: int = 1, window_tokens: int | None = None) -> ResumeRule:
    """Return the rule for a model.

    Args:
        grid_tokens: resume at multiples of this only, where the model keeps no states.
        window_tokens: free what lies further behind than this; None: nothing.
    """
    if not spec.has_states:
        return AtTokens(grid_tokens)
    return AT_SNAPSHOTS if window_tokens is None else BehindWindows(window_tokens)
