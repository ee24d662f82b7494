"""Estimates how often a cached prefix will be used again, from the inter-arrival times observed so far.

A *path* is a sequence that was served and may be continued. It *departs* when its request ends and *returns* when a
prompt continues it. Its *inter-arrival bin* is the bin, by powers of two, of the time between its last return and the
departure before (``use.interarrival_bin``); a path that has not returned yet has none. Time is counted in admissions
plus, where there is a clock, ``TICKS_PER_S`` per second: the first measures what passes through the cache meanwhile,
the second how long people and tools take, whatever the load.

``rate`` is the *reuse rate* of a path with a given inter-arrival bin that has been away for a given time: the
most returns per unit of memory and time that keeping it for any further length of time yields (``Outcomes``). The
estimate for a bin uses returns, losses (paths that are no longer remembered) and, as censored observations, the paths
that are still away; bins with few observations are shrunk towards the pooled ones and smoothed with their neighbours.
Before anything was observed the prior rate falls with the time away: least recently used is evicted first.

Paths are remembered by hashes of their tokens, whether or not their blocks are still cached: at most ``MAX_PATHS``.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from strandline.cache.policy.outcomes import BIN_EDGES, PRIOR_LOSSES, PRIOR_RATES, PRIOR_RETURNS, Outcomes, age_bin
from strandline.cache.use import NO_INTERARRIVAL, interarrival_bin
from strandline.clock import Clock
from strandline.ids import BLOCK_TOKENS
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES

ALL_BINS: Final = -1
"""Stands for the observations of all inter-arrival bins, pooled."""
TICKS_PER_S: Final = 2
"""Units of time in a second; an admission is one unit."""
MAX_PATHS: Final = 4096
MAX_PATHS_PER_KEY: Final = 8
"""Remembered paths with the same prefix, whose length is a power of two of blocks."""
REWIND_TOKENS: Final = 2 * BLOCK_TOKENS
REWIND_SHARE: Final = 1 / 8
"""A prompt that diverges from a path's prompt at most ``REWIND_TOKENS`` tokens, and at most this share of the prompt,
before its end still counts as the path's return."""
POOLED_WEIGHT: Final = 6.0
"""Total weight, in observations, of the pooled distribution in the estimate for one bin."""
NEIGHBOUR_WEIGHT: Final = 0.25
"""Weight of an observation of an adjacent bin: similar inter-arrival times behave alike, and the best stopping time is
chosen among noisy counts."""
HALF_LIFE_OBSERVATIONS: Final = 2048
"""All counts are halved after this many observations."""
ANSWER_END, PROMPT_END, INTERIOR, ELSEWHERE = range(4)
"""Resume points, where prompts resume: at the end of what was generated for a path, at the end of a path's prompt,
inside a path (as after a rewind), or elsewhere: on a prefix that several paths share, or nowhere."""
PRIOR_RESUMES: Final = (1.0, 1.0, 1.0, 18.0)
"""Prior pseudo-counts of prompts, by resume point."""
RESUME_DECAY: Final = 0.999
"""Factor by which each resumption decays the counts of those before."""
MAX_PATHS_COUNTED: Final = 512
"""About how many of the paths that are away are sampled as censored observations."""
MAX_OBSERVATIONS_UNTIL_REFRESH: Final = 256
"""Densities are computed again after this many observations, at first after a quarter of those so far."""


class Fingerprint(NamedTuple):
    """A hash of a path's tokens at one position."""

    end: int
    digest: int
    """Hash of the last block of tokens before ``end``."""


class Path(NamedTuple):
    """A sequence that was served."""

    key: int
    """Hash of the prefix under which the path is found."""
    fingerprints: tuple[Fingerprint, Fingerprint, Fingerprint]
    """By resume point up to ``INTERIOR``, which is a position shortly before the end of the prompt here."""
    is_answered: bool
    """Whether anything was generated after its prompt."""
    interarrival_bin: int
    departed_at: int
    num_halvings: int
    """How often counts had been halved when it departed. Its outcome has the weight of an observation of that time."""


class ReuseHistory:
    """Observes departures and returns of paths. ``now`` is its time, which ``count_admission`` advances.

    Args:
        clock: returns seconds; None: time is counted in admissions alone.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock
        self.now = 0
        self._num_admissions = 0
        self._start_s = clock() if clock else 0.0
        self._paths: OrderedDict[int, Path] = OrderedDict()
        self._by_key: dict[int, list[int]] = {}
        self._num_paths = 0
        self._outcomes = {ALL_BINS: Outcomes(PRIOR_RETURNS, PRIOR_LOSSES)}
        self._seen: dict[int, Outcomes] = {}
        """Also counts the paths that are away, as of the last refresh."""
        self._rates: dict[int, list[float]] = {}
        self._num_observed = 0
        self._num_halvings = 0
        self._resumes = list(PRIOR_RESUMES)
        self._interior_odds = _interior_odds(self._resumes)
        self._refresh_at = 1

    def __len__(self) -> int:
        return len(self._paths)

    def count_admission(self) -> None:
        """Advance the time by an admission and by the seconds that have passed."""
        self._num_admissions += 1
        elapsed_s = self.clock() - self._start_s if self.clock else 0.0
        self.now = self._num_admissions + int(TICKS_PER_S * elapsed_s)

    def record_departure(self, salt: str, data: bytearray, num_prompt: int, num_tokens: int, past_bin: int) -> None:
        """Remember a path whose request has ended with its first ``num_tokens`` tokens computed.

        Args:
            num_prompt: tokens of the prompt.
            past_bin: the path's inter-arrival bin so far.
        """
        if num_tokens < BLOCK_TOKENS:
            return
        num_prompt = max(min(num_prompt, num_tokens), BLOCK_TOKENS)
        before = max(num_prompt - min(REWIND_TOKENS, int(REWIND_SHARE * num_prompt)), BLOCK_TOKENS)
        key = _hash_of_block(salt, data, BLOCK_TOKENS << ((before // BLOCK_TOKENS).bit_length() - 1))
        rewound = Fingerprint(before, _hash_of_block(salt, data, before))
        prompt = Fingerprint(num_prompt, _hash_of_block(salt, data, num_prompt))
        is_answered = num_tokens > num_prompt
        whole = Fingerprint(num_tokens, _hash_of_block(salt, data, num_tokens)) if is_answered else prompt
        self._num_paths += 1
        fingerprints = (whole, prompt, rewound)
        self._paths[self._num_paths] = Path(key, fingerprints, is_answered, past_bin, self.now, self._num_halvings)
        alike = self._by_key.setdefault(key, [])
        alike.append(self._num_paths)
        if len(alike) > MAX_PATHS_PER_KEY:
            self._forget(alike[0])
        elif len(self._paths) > MAX_PATHS:
            self._forget(next(iter(self._paths)))

    def record_return(self, salt: str, data: bytearray) -> int:
        """Record the return of the path that a prompt continues; return its new inter-arrival bin.

        A path is continued where the prompt includes the path's prompt and answer, or else its prompt, or else its
        prompt up to shortly before the end. In the last case several matches are no return: they share that prefix.
        """
        candidates: list[int] = []
        for number in self._candidates(salt, data):
            if _matches(self._paths[number].fingerprints[ANSWER_END], salt, data):
                return self._end_absence(number, ANSWER_END)
            candidates.append(number)
        for point in (PROMPT_END, INTERIOR):
            found = [number for number in candidates if _matches(self._paths[number].fingerprints[point], salt, data)]
            if found and (point == PROMPT_END or len(found) == 1):
                return self._end_absence(found[0], point)
        return NO_INTERARRIVAL

    def _candidates(self, salt: str, data: bytearray) -> Iterator[int]:
        """Yield paths that a prompt may continue: longest prompts first, then newest."""
        num_blocks = len(data) // BLOCK_KEY_BYTES
        for exponent in range(num_blocks.bit_length() - 1, -1, -1):
            yield from reversed(self._by_key.get(_hash_of_block(salt, data, BLOCK_TOKENS << exponent), ()))

    def rate(self, past_bin: int, age: int) -> float:
        """Return the reuse rate of a path of an inter-arrival bin that has been away for ``age``."""
        return self._rates_by_age(past_bin)[age_bin(age)]

    def _rate_or_prior(self, past_bin: int, age: int) -> float:
        """Return that reuse rate, or the prior one if that is higher."""
        index = age_bin(age)
        rate, prior = self._rates_by_age(past_bin)[index], PRIOR_RATES[index]
        return rate if rate > prior else prior

    def _rates_by_age(self, past_bin: int) -> list[float]:
        """Return the reuse rates of an inter-arrival bin, by bin of the time away."""
        rates = self._rates.get(past_bin)
        if rates is None:
            rates = self._rates[past_bin] = self._estimate(past_bin).rates()
        return rates

    def _estimate(self, past_bin: int) -> Outcomes:
        """Return the outcomes of a bin, shrunk towards the pooled ones and smoothed with adjacent bins."""
        if not self._seen:
            self._seen = self._with_censored()
        own, pooled = self._seen.get(past_bin), self._seen[ALL_BINS]
        if own is None and past_bin == NO_INTERARRIVAL:
            return pooled
        estimate = (own or Outcomes()).plus(pooled, POOLED_WEIGHT / pooled.total)
        for adjacent in (past_bin - 1, past_bin + 1):
            if min(past_bin, adjacent) > NO_INTERARRIVAL and (similar := self._seen.get(adjacent)) is not None:
                estimate = estimate.plus(similar, NEIGHBOUR_WEIGHT)
        return estimate

    def _with_censored(self) -> dict[int, Outcomes]:
        """Return the outcomes by bin and pooled, with the paths that are away counted as lost at their present age.

        Without them mostly returns would be seen until ``MAX_PATHS`` others have departed, and a conversation that is
        over would look like one that is about to continue.
        """
        seen = {key: Outcomes(outcomes.returns, outcomes.losses) for key, outcomes in self._outcomes.items()}
        pooled = seen[ALL_BINS]
        index = len(BIN_EDGES) - 1  # paths are in the order of their departures
        stride = -(-len(self._paths) // MAX_PATHS_COUNTED) or 1
        for path in islice(self._paths.values(), 0, None, stride):
            age = self.now - path.departed_at
            while age < BIN_EDGES[index]:
                index -= 1
            weight = stride * self._weight(path)
            pooled.losses[index] += weight
            seen.setdefault(path.interarrival_bin, Outcomes()).losses[index] += weight
        return seen

    def _weight(self, path: Path) -> float:
        return 0.5 ** (self._num_halvings - path.num_halvings)

    def _end_absence(self, number: int, point: int) -> int:
        """Count a return; return the path's new inter-arrival bin."""
        path = self._take(number)
        if path.is_answered:
            self._count_resume(point)
        age = self.now - path.departed_at
        for outcomes in self._of(path):
            outcomes.returns[age_bin(age)] += self._weight(path)
        self._count()
        return interarrival_bin(age)

    def _forget(self, number: int) -> None:
        """Stop remembering a path: count a loss."""
        path = self._take(number)
        index = age_bin(self.now - path.departed_at)
        for outcomes in self._of(path):
            outcomes.losses[index] += self._weight(path)
        self._count()

    def _take(self, number: int) -> Path:
        path = self._paths.pop(number)
        alike = self._by_key[path.key]
        alike.remove(number)
        if not alike:
            del self._by_key[path.key]
        return path

    def count_hit(self, num_continuations: int) -> None:
        """Count a hit that is no path's return, on a snapshot with this many cached continuations."""
        self._count_resume(INTERIOR if num_continuations == 1 else ELSEWHERE)

    def _count_resume(self, point: int) -> None:
        """Count where a prompt resumes.

        Returns count whether or not the path was still cached: entries evicted for their low worth are never hit.
        """
        self._resumes = [RESUME_DECAY * count for count in self._resumes]
        self._resumes[point] += 1
        self._interior_odds = _interior_odds(self._resumes)

    def answer_rate(self, past_bin: int, age: int) -> float:
        """Return the rate of uses of the end of an answer."""
        return self._end_share(ANSWER_END) * self.rate(past_bin, age)

    def prompt_rate(self, past_bin: int, age: int) -> float:
        """Return the rate of uses of the end of a prompt whose answer is cached."""
        return self._end_share(PROMPT_END) * self._rate_or_prior(past_bin, age)

    def interior_rate(self, past_bin: int, age: int) -> float:
        """Return the rate of uses of a snapshot inside one path: by rewinds, and by prompts that diverge there."""
        return self._interior_odds * self._rate_or_prior(past_bin, age)

    def _end_share(self, end: int) -> float:
        """Return the share of an end of a path in the resumptions from either end."""
        return self._resumes[end] / (self._resumes[ANSWER_END] + self._resumes[PROMPT_END])

    def shared_rate(self, past_bin: int, age: int) -> float:
        """Return the rate of uses of a prefix that several paths share.

        Once per last inter-arrival time, and less the longer it has been unused beyond that. For a prefix that was
        used once, the time since then stands for the inter-arrival time.
        """
        gap = 1 + ((1 << past_bin) >> 1) if past_bin != NO_INTERARRIVAL else 1 + age
        return gap / max(gap, 1 + age) ** 2

    def _of(self, path: Path) -> tuple[Outcomes, Outcomes]:
        """Return the outcomes in which a path is counted: the pooled ones and those of its bin."""
        return self._outcomes[ALL_BINS], self._outcomes.setdefault(path.interarrival_bin, Outcomes())

    def _count(self) -> None:
        """Count an observation; halve old counts and refresh the rates when that is due."""
        self._num_observed += 1
        if self._num_observed % HALF_LIFE_OBSERVATIONS == 0:
            self._num_halvings += 1
            for outcomes in self._outcomes.values():
                outcomes.halve()
        if self._num_observed >= self._refresh_at:
            self._refresh_at += min(1 + self._num_observed // 4, MAX_OBSERVATIONS_UNTIL_REFRESH)
            self._rates.clear()
            self._seen.clear()


def _interior_odds(resumes: list[float]) -> float:
    """Return the odds of resuming inside a path, by which ``interior_rate`` scales the reuse rate."""
    interior = resumes[INTERIOR]
    return interior / (sum(resumes) - interior)


def _matches(fingerprint: Fingerprint, salt: str, data: bytearray) -> bool:
    """Return whether a prompt has a fingerprint's tokens at its position."""
    end, digest = fingerprint
    return end * TOKEN_BYTES <= len(data) and _hash_of_block(salt, data, end) == digest


def _hash_of_block(salt: str, data: bytearray, end: int) -> int:
    """Hash the last block of tokens before ``end``, with ``end``."""
    last = end * TOKEN_BYTES
    return hash((salt, end, bytes(data[last - BLOCK_KEY_BYTES : last])))
