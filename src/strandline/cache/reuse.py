"""When cached sequences come back: learned from those that did, also after they were evicted.

A *path* is a sequence that was served and may be continued. Its *habit* is how long it stayed away last time, by
powers of two; a path that has not come back yet has none. Time is counted in admissions and, where there is a clock, in
seconds: how much passes through the memory meanwhile, and how long people and tools take, which does not depend on it.

``density`` ranks what to keep: the most returns per unit of memory and time that can be had by keeping a path of that
habit and age for any length of time (``Outcomes``). It is learned from returns, from paths given up, and from those
that are still away, of each habit, where there are too few of them of all. Before anything was observed it falls with
age: what was used longest ago goes first.

Paths that left are remembered by a hash, whether their blocks are still cached or not: at most ``MAX_PATHS`` of them.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from strandline.cache.outcomes import EDGES, PRIOR_DENSITIES, PRIOR_LOSSES, PRIOR_RETURNS, Outcomes, bin_of
from strandline.cache.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES
from strandline.cache.use import NO_INTERARRIVAL, interarrival_bin
from strandline.clock import Clock
from strandline.ids import BLOCK_TOKENS

EVERY_HABIT: Final = -1
TICKS_PER_S: Final = 2
"""So many admissions age a path as much as a second does."""
MAX_PATHS: Final = 4096
MAX_ALIKE: Final = 8
"""Paths remembered that begin alike, up to a power of two of tokens."""
REWIND_TOKENS: Final = 2 * BLOCK_TOKENS
REWIND_SHARE: Final = 1 / 8
"""A prompt that leaves a path's prompt so shortly before its end, and repeats all of it but so much, still counts as
its return."""
WHOLE, PROMPT, REWOUND, ELSEWHERE = range(4)
"""Where prompts go on from: the marks of a path; and neither a path's return nor from inside one."""

NUM_BORROWED: Final = 6.0
"""So many observations of all habits together count beside a habit's own."""
NEIGHBOURS_SHARE: Final = 0.25
"""Observations of the next shorter and the next longer habit count so much of a habit's own: who stays away a little
longer behaves much alike, and the best stopping time is chosen among noisy counts."""
HALF_LIFE: Final = 2048
"""After so many observations those before count half."""
PRIOR_LANDINGS: Final = (1.0, 1.0, 1.0, 18.0)
"""So many prompts are taken to have gone on from there before any did: as many from either end, few from inside."""
HIT_MEMORY: Final = 0.999
"""With every hit those before count so much less."""
MAX_COUNTED: Final = 512
"""Of the paths that are away no more than about so many are counted, each for several."""
MAX_STALE: Final = 256
"""Densities are computed anew after so many observations, at first after a quarter of those so far."""


class Mark(NamedTuple):
    """What a path is known by."""

    end: int
    digest: int
    """Hash of the block's tokens that end there."""


class Path(NamedTuple):
    """A sequence that was served."""

    key: int
    """Where it is filed."""
    marks: tuple[Mark, Mark, Mark]
    """Where what was generated ends, where its prompt does, and shortly before that."""
    is_answered: bool
    """Whether anything was generated after its prompt."""
    habit: int
    left_at: int
    era: int
    """How often observations had been halved when it left: it counts as one of then, whatever becomes of it."""


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
        self._of_habit = {EVERY_HABIT: Outcomes(PRIOR_RETURNS, PRIOR_LOSSES)}
        self._seen: dict[int, Outcomes] = {}
        """The same with the paths that are away, as of when densities were last computed."""
        self._densities: dict[int, list[float]] = {}
        self._num_observed = 0
        self._era = 0
        self._landings = list(PRIOR_LANDINGS)
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
        num_prompt = max(min(num_prompt, num_tokens), BLOCK_TOKENS)
        before = max(num_prompt - min(REWIND_TOKENS, int(REWIND_SHARE * num_prompt)), BLOCK_TOKENS)
        key = _hash_of_block(salt, data, BLOCK_TOKENS << ((before // BLOCK_TOKENS).bit_length() - 1))
        rewound = Mark(before, _hash_of_block(salt, data, before))
        prompt = Mark(num_prompt, _hash_of_block(salt, data, num_prompt))
        is_answered = num_tokens > num_prompt
        whole = Mark(num_tokens, _hash_of_block(salt, data, num_tokens)) if is_answered else prompt
        self._num_paths += 1
        marks = (whole, prompt, rewound)
        self._paths[self._num_paths] = Path(key, marks, is_answered, habit, self.now, self._era)
        alike = self._alike.setdefault(key, [])
        alike.append(self._num_paths)
        if len(alike) > MAX_ALIKE:
            self._forget(alike[0])
        elif len(self._paths) > MAX_PATHS:
            self._forget(next(iter(self._paths)))

    def come_back(self, salt: str, data: bytearray) -> int:
        """Find the path that a prompt continues; return its habit from now on.

        One that it repeats whole, with what was generated, else one of which it repeats the prompt, else one whose
        prompt it leaves shortly before the end. Where several are left there, they share that much: none has returned.
        """
        alike: list[int] = []
        for number in self._that_begin_like(salt, data):
            if _is_at(self._paths[number].marks[WHOLE], salt, data):
                return self._welcome(number, WHOLE)
            alike.append(number)
        for place in (PROMPT, REWOUND):
            found = [number for number in alike if _is_at(self._paths[number].marks[place], salt, data)]
            if found and (place == PROMPT or len(found) == 1):
                return self._welcome(found[0], place)
        return NO_INTERARRIVAL

    def _that_begin_like(self, salt: str, data: bytearray) -> Iterator[int]:
        """Yield the paths that may be a prompt's, those with the longest prompts first, of these the last."""
        num_blocks = len(data) // BLOCK_KEY_BYTES
        for exponent in range(num_blocks.bit_length() - 1, -1, -1):
            yield from reversed(self._alike.get(_hash_of_block(salt, data, BLOCK_TOKENS << exponent), ()))

    def density(self, habit: int, age: int) -> float:
        """Return how many returns per unit of time keeping a path of this habit, unused for so long, brings at best."""
        densities = self._densities.get(habit)
        if densities is None:
            densities = self._densities[habit] = self._expected_of(habit).densities()
        return densities[bin_of(age)]

    def _expected_of(self, habit: int) -> Outcomes:
        """Return what became of paths of a habit, and in part of those that are like them."""
        if not self._seen:
            self._seen = self._with_those_away()
        own, of_all = self._seen.get(habit), self._seen[EVERY_HABIT]
        if own is None and habit == NO_INTERARRIVAL:
            return of_all
        expected = (own or Outcomes()).plus(of_all, NUM_BORROWED / of_all.total)
        for neighbour in (habit - 1, habit + 1):
            if min(habit, neighbour) > NO_INTERARRIVAL and (alike := self._seen.get(neighbour)) is not None:
                expected = expected.plus(alike, NEIGHBOURS_SHARE)
        return expected

    def _with_those_away(self) -> dict[int, Outcomes]:
        """Return what became of paths, by habit and of all. Those still away count as given up at the age they have.

        Without them only those that came back are seen, until ``MAX_PATHS`` others have left: a conversation that is
        over would look like one that is about to go on.
        """
        seen = {habit: outcomes.plus(Outcomes(), 0.0) for habit, outcomes in self._of_habit.items()}
        of_all = seen[EVERY_HABIT]
        index = len(EDGES) - 1  # paths are in the order in which they left
        stride = -(-len(self._paths) // MAX_COUNTED) or 1
        for path in islice(self._paths.values(), 0, None, stride):
            age = self.now - path.left_at
            while age < EDGES[index]:
                index -= 1
            weight = stride * self._weight(path)
            of_all.losses[index] += weight
            seen.setdefault(path.habit, Outcomes()).losses[index] += weight
        return seen

    def _weight(self, path: Path) -> float:
        return 0.5 ** (self._era - path.era)

    def _welcome(self, number: int, place: int) -> int:
        path = self._take(number)
        if path.is_answered:
            self._count_landing(place)
        age = self.now - path.left_at
        for outcomes in self._of(path):
            outcomes.returns[bin_of(age)] += self._weight(path)
        self._count()
        return interarrival_bin(age)

    def _forget(self, number: int) -> None:
        path = self._take(number)
        index = bin_of(self.now - path.left_at)
        for outcomes in self._of(path):
            outcomes.losses[index] += self._weight(path)
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
        self._count_landing(REWOUND if num_continuations == 1 else ELSEWHERE)

    def _count_landing(self, place: int) -> None:
        """Take note of where a prompt goes on from.

        Returns count whether or not anything was still cached: what is evicted for its small worth is never hit.
        """
        self._landings = [HIT_MEMORY * count for count in self._landings]
        self._landings[place] += 1

    def density_of_answer(self, habit: int, age: int) -> float:
        """Return how often the end of what was generated is used."""
        return self._share_of_returns(WHOLE) * self.density(habit, age)

    def density_of_prompt(self, habit: int, age: int) -> float:
        """Return how often the end of a path's prompt is used when an answer follows that is cached."""
        return self._share_of_returns(PROMPT) * max(self.density(habit, age), PRIOR_DENSITIES[bin_of(age)])

    def density_of_inner(self, habit: int, age: int) -> float:
        """Return how often a snapshot is used that one path goes on from: by rewinds, and who parts from it there."""
        return self._odds_of_inside() * max(self.density(habit, age), PRIOR_DENSITIES[bin_of(age)])

    def _share_of_returns(self, end: int) -> float:
        """Return which share of the returns to an end of a path go on from this one, as seen so far."""
        return self._landings[end] / (self._landings[WHOLE] + self._landings[PROMPT])

    def _odds_of_inside(self) -> float:
        """Return how many prompts go on from inside a path, as seen so far, for each that goes on from another place.

        That multiplies how often paths return, or how often anything does of which nothing is known.
        """
        return self._landings[REWOUND] / (sum(self._landings) - self._landings[REWOUND])

    def density_of_shared(self, habit: int, age: int) -> float:
        """Return how often what several paths share is used: once in as long as last time.

        When it has been unused for longer, that is as unlikely to go on as it has been longer. Of what was used once,
        the time since then is all that is known.
        """
        gap = 1 + ((1 << habit) >> 1) if habit != NO_INTERARRIVAL else 1 + age
        return gap / max(gap, 1 + age) ** 2

    def _of(self, path: Path) -> tuple[Outcomes, Outcomes]:
        """Return what a path's outcome is counted in: that of all, and that of its habit."""
        return self._of_habit[EVERY_HABIT], self._of_habit.setdefault(path.habit, Outcomes())

    def _count(self) -> None:
        """Take note of one more observation: let the old ones fade, and what follows from them be seen."""
        self._num_observed += 1
        if self._num_observed % HALF_LIFE == 0:
            self._era += 1
            for outcomes in self._of_habit.values():
                outcomes.halve()
        if self._num_observed >= self._refresh_at:
            self._refresh_at += min(1 + self._num_observed // 4, MAX_STALE)
            self._densities.clear()
            self._seen.clear()


def _is_at(mark: Mark, salt: str, data: bytearray) -> bool:
    """Return whether a prompt goes past a mark."""
    return mark.end * TOKEN_BYTES <= len(data) and _hash_of_block(salt, data, mark.end) == mark.digest


def _hash_of_block(salt: str, data: bytearray, end: int) -> int:
    """Hash the block that ends at ``end``, with its place."""
    last = end * TOKEN_BYTES
    return hash((salt, end, bytes(data[last - BLOCK_KEY_BYTES : last])))
