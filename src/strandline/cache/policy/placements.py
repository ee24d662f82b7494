"""Placements: ``auto``, those of the other cache modes, and that of deterministic engines.

``Auto`` takes snapshots where the next turn resumes (at the ends of prompt and answer), where other prompts will share
the prefix (where a prompt diverges from a cached one, and at marked positions: ends of tools, system prompt and turns),
and on a *ladder* through prompts seen for the first time, so that the second prompt with a prefix already hits most of
it. When memory is scarce, one *probe* in prompts that are mostly new takes the place of the ladder.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from strandline.cache.placement import Admission, Placement, SnapshotPositions
from strandline.errors import ConfigError
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import SnapshotKind
from strandline.records.tokens import resumable_end

RUNGS_PER_OCTAVE: Final = 4
FIRST_RUNG: Final = 4 * BLOCK_TOKENS
MIN_LADDER_TOKENS: Final = 512
"""A prompt with fewer new tokens, such as a turn of a conversation, gets no ladder."""
MIN_MARK_TOKENS: Final = 16
"""A mark fewer tokens than this after the start is omitted: the snapshot at the start serves as well."""
MIN_REWIND_SLOTS: Final = 10
"""A prompt whose new keys and values would fill this many slots gets a snapshot shortly before its end even when memory
is scarce, since a rewind there would recompute all of it."""
FALLBACK_SLOTS: Final = 20
"""Also one snapshot every ``FALLBACK_SLOTS * snapshot_tokens`` tokens, as fallbacks once its end has been evicted."""
PROBE_SHARE: Final = 0.75
"""Position of the probe: after this share of what is new in the prompt."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The default placement."""

    is_stepwise: ClassVar[bool] = False

    def on_admission(self, admission: Admission) -> SnapshotPositions:
        """Return the branch point, the marks, and as many rungs as spare memory allows, a few when it is scarce."""
        start, end = admission.start, admission.end
        rungs = _thinned(ladder(start, end), admission.num_spare_snapshots)
        positions = dict.fromkeys(rungs, SnapshotKind.LADDER) or _when_scarce(admission)
        positions |= {mark: SnapshotKind.MARK for mark in admission.marks if start + MIN_MARK_TOKENS <= mark < end}
        if start < admission.kv_tokens < end:
            positions[admission.kv_tokens] = SnapshotKind.BRANCH
        return positions

    def in_step(self, start: int, end: int) -> int | None:
        return None

    def keeps(self, kind: SnapshotKind) -> bool:
        return True

    def takes_branches(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Align:
    """Takes a snapshot at the last multiple of ``stride`` in every step."""

    stride: int

    is_stepwise: ClassVar[bool] = True

    def on_admission(self, admission: Admission) -> SnapshotPositions:
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
    """Takes a snapshot at every multiple of ``stride``, in prompts and while decoding."""

    stride: int
    ends: frozenset[SnapshotKind] = frozenset()
    """Further kinds that are kept: ends of prompts and answers."""

    is_stepwise: ClassVar[bool] = True

    def on_admission(self, admission: Admission) -> SnapshotPositions:
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
class NoSnapshots:
    """Takes no snapshots but those of preempted requests."""

    is_stepwise: ClassVar[bool] = False

    def on_admission(self, admission: Admission) -> SnapshotPositions:
        return {}

    def in_step(self, start: int, end: int) -> int | None:
        return None

    def keeps(self, kind: SnapshotKind) -> bool:
        return kind is SnapshotKind.PREEMPTION

    def takes_branches(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Moved:
    """A base of placements that move the positions of another one in the prompt."""

    inner: Placement

    @property
    def is_stepwise(self) -> bool:
        return self.inner.is_stepwise

    def in_step(self, start: int, end: int) -> int | None:
        return self.inner.in_step(start, end)

    def keeps(self, kind: SnapshotKind) -> bool:
        return self.inner.keeps(kind)

    def takes_branches(self) -> bool:
        return self.inner.takes_branches()


class OutsidePictures(_Moved):
    """Moves the positions of another placement that are strictly inside a picture to its start."""

    __slots__ = ()

    def on_admission(self, admission: Admission) -> SnapshotPositions:
        return _moved(self.inner.on_admission(admission), admission, 1)


class OnGrid(_Moved):
    """Rounds the positions of another placement down to whole blocks of the prompt.

    For deterministic engines, where every snapshot must be the state of a prefill that began and ended on the 64-token
    grid. The end of the prompt becomes its last multiple of 64, and generated tokens get no snapshots.
    """

    __slots__ = ()

    def on_admission(self, admission: Admission) -> SnapshotPositions:
        positions = _moved(self.inner.on_admission(admission), admission, BLOCK_TOKENS)
        last = resumable_end(admission.data, admission.end, BLOCK_TOKENS)
        if self.keeps(SnapshotKind.PROMPT_END) and admission.start < last < admission.end:
            positions[last] = SnapshotKind.PROMPT_END
        return positions

    def keeps(self, kind: SnapshotKind) -> bool:
        return kind is SnapshotKind.PROMPT_END and self.inner.keeps(kind)


def _moved(chosen: SnapshotPositions, admission: Admission, multiple: int) -> dict[int, SnapshotKind]:
    """Return positions moved back to multiples of a number of tokens outside pictures; the last kind stays."""
    moved = {resumable_end(admission.data, position, multiple): chosen[position] for position in sorted(chosen)}
    return {position: kind for position, kind in moved.items() if position > admission.start}


AUTO: Final = Auto()


def ladder(start: int, end: int) -> list[int]:
    """Return positions for snapshots of a prompt that is computed from ``start`` to ``end``, on the 64-token grid.

    From the start there are four rungs per octave, so that every prefix of 256 tokens or more has one within its last
    fifth. From the end backwards the distances double, for edits near the end. The last rung is at least one block
    before the end, for prompts that differ only in the last tokens of the template.
    """
    if end - start < MIN_LADDER_TOKENS:
        return []
    rungs = set[int]()
    octave = max(FIRST_RUNG, 1 << start.bit_length() >> 1)  # the one that the start is in
    while octave < end:
        rungs.update(octave + part * octave // RUNGS_PER_OCTAVE for part in range(RUNGS_PER_OCTAVE))
        octave *= 2
    distance = BLOCK_TOKENS
    while distance < end - start:
        if distance == BLOCK_TOKENS or 16 * distance >= end - start:
            rungs.add((end - distance) // BLOCK_TOKENS * BLOCK_TOKENS)
        distance *= 2
    return sorted(rung for rung in rungs if start < rung < end)


def fallbacks(start: int, end: int, stride: int) -> list[int]:
    """Return positions on the 64-token grid, ``stride`` apart from each other, from the end and from the start."""
    return [position // BLOCK_TOKENS * BLOCK_TOKENS for position in range(end - stride, start + stride - 1, -stride)]


def probe(admission: Admission) -> int | None:
    """Return the position of the one rung that a prompt gets when memory is scarce, on the 64-token grid, or None.

    New is what comes after the cached keys and values and the last mark, since other prompts that share less diverge at
    a branch point or a mark. A prompt that continues a path is a turn of a conversation that has been evicted. It gets
    no probe, and neither does a prompt that is less than half new.
    """
    known = max(admission.start, admission.kv_tokens, *(mark for mark in admission.marks if mark < admission.end))
    num_new = admission.end - known
    if not admission.may_probe or num_new < max(MIN_LADDER_TOKENS, known):
        return None
    return int(known + PROBE_SHARE * num_new) // BLOCK_TOKENS * BLOCK_TOKENS


def _when_scarce(admission: Admission) -> SnapshotPositions:
    """Return the positions inside a prompt when memory is scarce: the probe, and a few in long prompts."""
    start, end = admission.start, admission.end
    positions: SnapshotPositions = {}
    if (probed := probe(admission)) is not None:
        positions[probed] = SnapshotKind.PROBE
    if 0 < MIN_REWIND_SLOTS * admission.snapshot_tokens <= end - start:
        rungs = fallbacks(start, end, FALLBACK_SLOTS * admission.snapshot_tokens)
        positions |= dict.fromkeys([*rungs, (end // BLOCK_TOKENS - 1) * BLOCK_TOKENS], SnapshotKind.LADDER)
    return positions


def _thinned(rungs: list[int], num_spare: int) -> list[int]:
    """Return every n-th rung, so that there are at most ``num_spare``."""
    if num_spare <= 0 or not rungs:
        return []
    step = -(-len(rungs) // num_spare)
    return rungs[::-1][::step]


def placement(mode: str, stride: int) -> Placement:
    """Return the placement of a ``mamba_cache_mode``; ``stride`` is the grid of ``align`` and ``all``.

    Raises:
        ConfigError: there is no such mode, or the stride is not a multiple of a block.
    """
    if stride < 1 or stride % BLOCK_TOKENS:
        raise ConfigError(f"--mamba-block-size must be a multiple of {BLOCK_TOKENS}, got {stride}")
    placements: dict[str, Placement] = {
        "auto": Auto(),
        "align": Align(stride),
        "all": EveryBoundary(stride),
        "none": NoSnapshots(),
    }
    if mode not in placements:
        raise ConfigError(f"--mamba-cache-mode must be one of {', '.join(placements)}; got {mode!r}")
    return placements[mode]
