"""When cached sequences come back: learned from those that did, also after they were evicted.

A *path* is a sequence that was served and may be continued. Its *habit* is how long it stayed away last time, by
powers of two; a path that has not come back yet has none. Time is counted in admissions and, where there is a clock, in
seconds: how much passes through the memory meanwhile, and how long people and tools take, which does not depend on it.

``density`` ranks what to keep: the most returns per unit of memory and time that can be had by keeping a path of that
habit and age for any length of time. It is learned from returns and from paths given up, of each habit, where there
are too few of them of all. Before anything was observed it falls with age: what was used longest ago goes first.
Source: hit density as in LHD (Beckmann, Chen, Cidon, NSDI 2018); the best stopping time is Gittins' index.

Paths that left are remembered by a hash, whether their blocks are still cached or not: at most ``MAX_PATHS`` of them.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise
from math import log
from typing import Final, NamedTuple

from strandline.cache.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES
from strandline.clock import Clock
from strandline.ids import BLOCK_TOKENS

NO_HABIT: Final = 0
TICKS_PER_S: Final = 2
"""So many admissions age a path as much as a second does."""
MAX_PATHS: Final = 4096
MAX_ALIKE: Final = 8
"""Paths remembered that begin alike, up to a power of two of tokens."""
REWIND_TOKENS: Final = 2 * BLOCK_TOKENS
"""A prompt that leaves a path's prompt so shortly before its end still counts as its return."""

EDGES: Final = (0, 1, 2, 3, *(round(2 ** (half / 2)) for half in range(4, 42)))
"""Ages at which bins begin, two to an octave; the last one has no end."""
WIDTHS: Final = (*(after - before for before, after in pairwise(EDGES)), EDGES[-1])

PRIOR_RETURNS: Final = tuple(
    0.15 * log((edge + width + 1) / (edge + 1)) for edge, width in zip(EDGES, WIDTHS, strict=True)
)
PRIOR_LOSSES: Final = tuple(0.3 * returns for returns in PRIOR_RETURNS)
"""Before anything is seen: the chance of a return falls with the age, as its inverse."""
NUM_BORROWED: Final = 6.0
"""So many observations of all habits together count beside a habit's own."""
NEIGHBOURS_SHARE: Final = 0.25
"""Observations of the next shorter and the next longer habit count so much of a habit's own: who stays away a little
longer behaves much alike, and the best stopping time is chosen among noisy counts."""
HALF_LIFE: Final = 2048
"""After so many observations those before count half."""
PRIOR_HITS: Final = 20.0
PRIOR_INNER_HITS: Final = 1.0
"""Before anything was hit, one hit in so many lands where a path goes on."""
HIT_MEMORY: Final = 0.999
"""With every hit those before count so much less."""
MAX_STALE: Final = 256
"""Densities are computed anew after so many observations, at first after a quarter of those so far."""


def bin_of(age: int) -> int:
    """Return the bin that an age lies in."""
    return bisect_right(EDGES, age) - 1


class Outcomes:
    """What became of paths, by the age at which it did."""

    def __init__(
        self, returns: Iterable[float] = (0.0,) * len(EDGES), losses: Iterable[float] = (0.0,) * len(EDGES)
    ) -> None:
        self.returns = list(returns)
        self.losses = list(losses)

    @property
    def total(self) -> float:
        return sum(self.returns) + sum(self.losses)

    def plus(self, other: "Outcomes", weight: float) -> "Outcomes":
        """Return the sum, the other's counts multiplied."""
        return Outcomes(
            (mine + weight * theirs for mine, theirs in zip(self.returns, other.returns, strict=True)),
            (mine + weight * theirs for mine, theirs in zip(self.losses, other.losses, strict=True)),
        )

    def halve(self) -> None:
        self.returns = [count / 2 for count in self.returns]
        self.losses = [count / 2 for count in self.losses]

    def densities(self) -> list[float]:
        """Return, for each bin as the age now, the most returns per time that keeping until some later age gives."""
        segments: list[tuple[float, float]] = []
        densities = [0.0] * len(EDGES)
        left = 0.0
        for index in range(len(EDGES) - 1, -1, -1):
            gone = self.returns[index] + self.losses[index]
            returns, time = self.returns[index], (left + gone / 2) * WIDTHS[index]
            left += gone
            while segments and segments[-1][0] * time >= returns * segments[-1][1]:
                more = segments.pop()
                returns, time = returns + more[0], time + more[1]
            segments.append((returns, time))
            densities[index] = returns / time
        return densities


PRIOR_DENSITIES: Final = Outcomes(PRIOR_RETURNS, PRIOR_LOSSES).densities()


class Path(NamedTuple):
    """A sequence that was served."""

    key: int
    """Where it is filed."""
    end: int
    """It is known by the block that ends here, shortly before its prompt does."""
    mark: int
    """Hash of that block."""
    last: int
    """What was generated ends here."""
    last_mark: int
    """Hash of the block's tokens that end there."""
    habit: int
    left_at: int


class ReuseHistory:
    """Watches paths leave and come back. ``now`` is the age of the history; ``tick`` moves it.

    Args:
        clock: tells the seconds; None: time is admissions alone.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock
        self.now = 0
        self._num_admissions = 0
        self._start_s = clock() if clock else 0.0
        self._paths: OrderedDict[int, Path] = OrderedDict()
        self._alike: dict[int, list[int]] = {}
        self._num_paths = 0
        self._of_all = Outcomes(PRIOR_RETURNS, PRIOR_LOSSES)
        self._of_habit: dict[int, Outcomes] = {}
        self._densities: dict[int, list[float]] = {}
        self._num_observed = 0
        self._num_hits, self._num_inner_hits = PRIOR_HITS, PRIOR_INNER_HITS
        self._refresh_at = 1

    def __len__(self) -> int:
        return len(self._paths)

    def tick(self) -> None:
        """Count an admission, and the seconds that have passed."""
        self._num_admissions += 1
        elapsed_s = self.clock() - self._start_s if self.clock else 0.0
        self.now = self._num_admissions + int(TICKS_PER_S * elapsed_s)

    def leave(self, salt: str, data: bytearray, num_prompt: int, num_tokens: int, habit: int) -> None:
        """Remember a path whose first ``num_tokens`` tokens are cached now and that nobody uses any more.

        Args:
            num_prompt: tokens before those that were generated.
        """
        if num_tokens < BLOCK_TOKENS:
            return
        end = max((min(num_prompt, num_tokens) - REWIND_TOKENS) // BLOCK_TOKENS, 1) * BLOCK_TOKENS
        rung = BLOCK_TOKENS << ((end // BLOCK_TOKENS).bit_length() - 1)
        key = _hash_of_block(salt, data, rung)
        self._num_paths += 1
        marks = (end, _hash_of_block(salt, data, end), num_tokens, _hash_of_block(salt, data, num_tokens))
        self._paths[self._num_paths] = Path(key, *marks, habit, self.now)
        alike = self._alike.setdefault(key, [])
        alike.append(self._num_paths)
        if len(alike) > MAX_ALIKE:
            self._forget(alike[0])
        elif len(self._paths) > MAX_PATHS:
            self._forget(next(iter(self._paths)))

    def come_back(self, salt: str, data: bytearray) -> int:
        """Find the path that a prompt continues; return its habit from now on."""
        num_tokens = len(data) // TOKEN_BYTES
        rung = BLOCK_TOKENS << max((num_tokens // BLOCK_TOKENS).bit_length() - 1, 0)
        while rung >= BLOCK_TOKENS:
            for number in reversed(self._alike.get(_hash_of_block(salt, data, rung), ())):
                path = self._paths[number]
                if path.end <= num_tokens and _hash_of_block(salt, data, path.end) == path.mark:
                    is_whole = path.last <= num_tokens and _hash_of_block(salt, data, path.last) == path.last_mark
                    self._count_landing(is_inner=not is_whole)
                    return self._welcome(number)
            rung //= 2
        return NO_HABIT

    def density(self, habit: int, age: int) -> float:
        """Return how many returns per unit of time keeping a path of this habit, unused for so long, brings at best."""
        densities = self._densities.get(habit)
        if densities is None:
            densities = self._densities[habit] = self._expected_of(habit).densities()
        return densities[bin_of(age)]

    def _expected_of(self, habit: int) -> Outcomes:
        """Return what became of paths of a habit, and in part of those that are like them."""
        own, of_all = self._of_habit.get(habit), self._of_all
        if own is None and habit == NO_HABIT:
            return of_all
        expected = (own or Outcomes()).plus(of_all, NUM_BORROWED / of_all.total)
        for neighbour in (habit - 1, habit + 1):
            if min(habit, neighbour) > NO_HABIT and (alike := self._of_habit.get(neighbour)) is not None:
                expected = expected.plus(alike, NEIGHBOURS_SHARE)
        return expected

    def _welcome(self, number: int) -> int:
        path = self._take(number)
        age = self.now - path.left_at
        self._of_all.returns[bin_of(age)] += 1
        self._of(path.habit).returns[bin_of(age)] += 1
        self._count()
        return habit_after(age)

    def _forget(self, number: int) -> None:
        path = self._take(number)
        index = bin_of(self.now - path.left_at)
        self._of_all.losses[index] += 1
        self._of(path.habit).losses[index] += 1
        self._count()

    def _take(self, number: int) -> Path:
        path = self._paths.pop(number)
        alike = self._alike[path.key]
        alike.remove(number)
        if not alike:
            del self._alike[path.key]
        return path

    def count_hit(self, num_continuations: int) -> None:
        """Take note of a hit that is no path's return, on a snapshot after which so many cached paths go on."""
        self._count_landing(is_inner=num_continuations == 1)

    def _count_landing(self, *, is_inner: bool) -> None:
        """Take note of where a prompt goes on from: inside a path, or at a path's end or where several part.

        Returns count whether or not anything was still cached: what is evicted for its small worth is never hit.
        """
        self._num_hits = HIT_MEMORY * self._num_hits + 1
        self._num_inner_hits = HIT_MEMORY * self._num_inner_hits + is_inner

    def density_of_inner(self, habit: int, age: int) -> float:
        """Return how often a snapshot is used that one path goes on from: by rewinds, and who parts from it there.

        As often as its path returns, or as anything does of which nothing is known; times the odds that a prompt goes
        on from there and not from a path's end, as seen so far.
        """
        odds = self._num_inner_hits / max(self._num_hits - self._num_inner_hits, 1.0)
        return odds * max(self.density(habit, age), PRIOR_DENSITIES[bin_of(age)])

    def density_of_shared(self, habit: int, age: int) -> float:
        """Return how often what several paths share is used: once in as long as last time, or as it is unused now."""
        return 1 / (1 + max(age, (1 << habit) >> 1))

    def _of(self, habit: int) -> Outcomes:
        return self._of_habit.setdefault(habit, Outcomes())

    def _count(self) -> None:
        """Take note of one more observation: let the old ones fade, and what follows from them be seen."""
        self._num_observed += 1
        if self._num_observed % HALF_LIFE == 0:
            for outcomes in (self._of_all, *self._of_habit.values()):
                outcomes.halve()
        if self._num_observed >= self._refresh_at:
            self._refresh_at += min(1 + self._num_observed // 4, MAX_STALE)
            self._densities.clear()


def habit_after(age: int) -> int:
    """Return the habit of what was used again after ``age`` admissions."""
    return 1 + max(age, 1).bit_length()


def next_edge(age: int) -> int:
    """Return the age at which an age's bin ends."""
    index = bin_of(age) + 1
    return EDGES[index] if index < len(EDGES) else 2 * age


def _hash_of_block(salt: str, data: bytearray, end: int) -> int:
    """Hash the block that ends at ``end``, with its place."""
    last = end * TOKEN_BYTES
    return hash((salt, end, bytes(data[last - BLOCK_KEY_BYTES : last])))
