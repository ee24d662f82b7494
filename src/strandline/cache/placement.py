"""Which snapshots to take: a pure function from a request and the room that is left to token positions.

A placement is asked when a request is admitted (``on_admission``), at every step (``in_step``), and where a request's
own slot could stay behind as a snapshot (``keeps``). What it answers is a wish: a cut is left out when no slot can be
had.

``Auto`` keeps what the next turn resumes from (the prompt's end and the generation's), what others will share (where a
prompt leaves a cached one, and marked positions: ends of tools, system prompt and turns), and, while there is room to
spare, a *ladder* through prompts seen for the first time: the second prompt with a prefix already hits most of it.
"""

from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, Protocol

from strandline.cache.account import SnapshotKind
from strandline.errors import ConfigError
from strandline.ids import BLOCK_TOKENS

Wishes = dict[int, SnapshotKind]
"""Positions worth a snapshot, and why."""

RUNGS_PER_OCTAVE: Final = 4
FIRST_RUNG: Final = 4 * BLOCK_TOKENS
MIN_LADDER_TOKENS: Final = 512
"""Fewer new tokens than this are no more than a turn of a conversation: they get no ladder."""
MIN_MARK_TOKENS: Final = 16
"""A mark so close behind where the request resumes, or its beginning, is left out: that snapshot serves as well."""
MIN_REWIND_SLOTS: Final = 10
"""A prompt of which as many new tokens are computed as fill so many slots gets a snapshot shortly before its end, also
when memory is scarce: a rewind there would cost as much again."""
REST_SLOTS: Final = 20
"""And one in as many tokens as fill so many slots, to resume from when its end has been evicted."""
RESERVE_SHARE: Final = 0.25
"""A ladder leaves this share of the memory free."""


class Admission(NamedTuple):
    """What a placement knows of a request that is about to start."""

    start: int
    """It resumes here."""
    end: int
    """Its tokens, so far."""
    kv_tokens: int
    """Its keys and values are cached up to here; beyond ``start``, that is where it leaves a cached prompt."""
    marks: tuple[int, ...]
    """Positions that its sender, or its chat template, says others will share."""
    num_spare_slots: int
    """Slots that can be had before memory is scarce: nothing has to go for them."""
    slot_tokens: int = 0
    """Tokens whose keys and values are as large as a slot; 0: not known."""


class Placement(Protocol):
    """Chooses positions. Has no state of its own."""

    @property
    def is_stepwise(self) -> bool:
        """Whether ``in_step`` ever returns a position."""

    def on_admission(self, admission: Admission) -> Wishes:
        """Return positions in ``(start, end)``."""

    def in_step(self, start: int, end: int) -> int | None:
        """Return a position in ``(start, end]`` for a step that computes the tokens between, or None."""

    def keeps(self, kind: SnapshotKind) -> bool:
        """Return whether a slot that becomes free is left behind as such a snapshot."""

    def takes_branches(self) -> bool:
        """Return whether waiting requests may ask for a cut where they part from a running one."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The default."""

    is_stepwise: ClassVar[bool] = False

    def on_admission(self, admission: Admission) -> Wishes:
        """Return branch point, marks, and as much of the ladder as there is room for."""
        start, end = admission.start, admission.end
        rungs = _thinned(ladder(start, end), admission.num_spare_slots)
        if not rungs and 0 < MIN_REWIND_SLOTS * admission.slot_tokens <= end - start:
            rungs = [*rests(start, end, REST_SLOTS * admission.slot_tokens), (end // BLOCK_TOKENS - 1) * BLOCK_TOKENS]
        wishes = dict.fromkeys(rungs, SnapshotKind.LADDER)
        wishes |= {mark: SnapshotKind.MARK for mark in admission.marks if start + MIN_MARK_TOKENS <= mark < end}
        if start < admission.kv_tokens < end:
            wishes[admission.kv_tokens] = SnapshotKind.BRANCH
        return wishes

    def in_step(self, start: int, end: int) -> int | None:
        return None

    def keeps(self, kind: SnapshotKind) -> bool:
        return True

    def takes_branches(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Align:
    """The last boundary of every step, on a grid of ``stride`` tokens."""

    stride: int

    is_stepwise: ClassVar[bool] = True

    def on_admission(self, admission: Admission) -> Wishes:
        return {}

    def in_step(self, start: int, end: int) -> int | None:
        last = end // self.stride * self.stride
        return last if last > start else None

    def keeps(self, kind: SnapshotKind) -> bool:
        return kind is SnapshotKind.PREEMPTION

    def takes_branches(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class EveryBoundary:
    """Every boundary of a prompt on a grid of ``stride`` tokens, and those that decoding comes to."""

    stride: int
    ends: frozenset[SnapshotKind] = frozenset()
    """Kept too: the prompt's end and the generation's, perhaps."""

    is_stepwise: ClassVar[bool] = True

    def on_admission(self, admission: Admission) -> Wishes:
        first = admission.start // self.stride + 1
        last = (admission.end - 1) // self.stride
        return {n * self.stride: SnapshotKind.BOUNDARY for n in range(first, last + 1)}

    def in_step(self, start: int, end: int) -> int | None:
        last = end // self.stride * self.stride
        return last if last > start else None

    def keeps(self, kind: SnapshotKind) -> bool:
        return kind is SnapshotKind.PREEMPTION or kind in self.ends

    def takes_branches(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Nothing:
    """No snapshots, but of preempted requests."""

    is_stepwise: ClassVar[bool] = False

    def on_admission(self, admission: Admission) -> Wishes:
        return {}

    def in_step(self, start: int, end: int) -> int | None:
        return None

    def keeps(self, kind: SnapshotKind) -> bool:
        return kind is SnapshotKind.PREEMPTION

    def takes_branches(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class OnGrid:
    """What another placement wishes for, rounded down to whole blocks of a prompt.

    For deterministic engines: every snapshot is then the state of a prefill that began and ended on the grid. So the
    prompt's end becomes the last multiple of a block in it, and nothing is kept of what was generated.
    """

    inner: Placement

    @property
    def is_stepwise(self) -> bool:
        return self.inner.is_stepwise

    def on_admission(self, admission: Admission) -> Wishes:
        wished = self.inner.on_admission(admission)
        wishes = {position // BLOCK_TOKENS * BLOCK_TOKENS: wished[position] for position in sorted(wished)}
        last = admission.end // BLOCK_TOKENS * BLOCK_TOKENS
        if self.keeps(SnapshotKind.PROMPT_END) and last < admission.end:
            wishes[last] = SnapshotKind.PROMPT_END
        return {position: kind for position, kind in wishes.items() if position > admission.start}

    def in_step(self, start: int, end: int) -> int | None:
        return self.inner.in_step(start, end)

    def keeps(self, kind: SnapshotKind) -> bool:
        return kind is SnapshotKind.PROMPT_END and self.inner.keeps(kind)

    def takes_branches(self) -> bool:
        return self.inner.takes_branches()


def ladder(start: int, end: int) -> list[int]:
    """Return the rungs of a prompt that is computed from ``start`` to ``end``, on the 64-token grid.

    Upwards there are four to an octave, so that a prefix of 256 tokens or more has one within its last fifth. From the
    end backwards distances double, for edits of what was said last; the nearest is at least a block away, where a
    prompt resumes that repeats this one but for its template's last tokens.
    """
    if end - start < MIN_LADDER_TOKENS:
        return []
    rungs = set[int]()
    octave = FIRST_RUNG
    while octave < end:
        rungs.update(octave + part * octave // RUNGS_PER_OCTAVE for part in range(RUNGS_PER_OCTAVE))
        octave *= 2
    distance = BLOCK_TOKENS
    while distance < end - start:
        if distance == BLOCK_TOKENS or 16 * distance >= end - start:
            rungs.add((end - distance) // BLOCK_TOKENS * BLOCK_TOKENS)
        distance *= 2
    return sorted(rung for rung in rungs if start < rung < end)


def rests(start: int, end: int, stride: int) -> list[int]:
    """Return positions ``stride`` apart, counted from the end, and as far from the start; on the 64-token grid."""
    return [position // BLOCK_TOKENS * BLOCK_TOKENS for position in range(end - stride, start + stride - 1, -stride)]


def _thinned(rungs: list[int], num_spare: int) -> list[int]:
    """Return every n-th rung, so that they are no more than there is room for."""
    if num_spare <= 0 or not rungs:
        return []
    step = -(-len(rungs) // num_spare)
    return rungs[::-1][::step]


def placement(mode: str, stride: int) -> Placement:
    """Return the placement of a ``mamba_cache_mode``; ``stride`` is the grid of those that have one.

    Raises:
        ConfigError: there is no such mode, or the grid is not of whole blocks.
    """
    if stride < 1 or stride % BLOCK_TOKENS:
        raise ConfigError(f"mamba_block_size must be a multiple of {BLOCK_TOKENS}, got {stride}")
    placements: dict[str, Placement] = {
        "auto": Auto(),
        "align": Align(stride),
        "all": EveryBoundary(stride),
        "none": Nothing(),
    }
    if mode not in placements:
        raise ConfigError(f"mamba_cache_mode must be one of {', '.join(placements)}; got {mode!r}")
    return placements[mode]
