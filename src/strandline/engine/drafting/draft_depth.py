"""How many drafts pay: chosen at every step from the drafts accepted so far and from measured step times.

A step with ``d`` drafts for each decoding sequence gives each ``E = 1 + r1 + r1 r2 + ...`` tokens, where ``ri`` is how
often draft ``i`` is accepted after accepted ones, and takes the time that such steps took. The depth with the most
tokens per second is chosen. It is 0 where none pays: with many sequences, or few accepted drafts.

Steps that also compute prompts count as well. The prompts' tokens have to be computed at any depth; what depends on it
is how much longer a step takes for each of them. So a token of a sequence takes ``t / E + p c`` seconds, where ``t`` is
the time of a step of decodes alone, ``c`` the surcharge for a prompt's token, and ``p`` the number of these that come
with each token of a sequence. Where all steps hold prompts, it takes ``t / E`` with the time of such steps.

Times are kept for numbers of sequences within a factor of two. A depth is tried first where it has no times, and the
largest until its last draft has been verified several times: shallower steps learn nothing of that draft. Later the
neighbours of the best depth, and depth 0, are tried now and then: times change, and nothing is learned of drafts at
depth 0. How long the best one is kept in between follows from what a trial costs. Of the newest times the least counts,
for a few slow steps are no reason to leave a depth: prompts may have joined that were cached whole. Where few sequences
have drafts (n-grams), steps of a depth may never come about; its time is that of the depth below, then.

A draft layer drafts after one step what the next one verifies. So the first step of another depth verifies as many as
the one before drafted: its time belongs to neither. A trial is two steps.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from strandline.records.plan import StepPlan

NEWEST_TIMES: Final = 8
"""How many measured times of a depth count, the newest ones."""

NEWEST_MIXED: Final = 32
"""The same of steps that compute prompts, whose sizes differ."""

LOAD_FADING: Final = 0.01
"""Weight of the newest step in the number of prompts' tokens that come with each token of a sequence."""

ACCEPTANCE_FADING: Final = 0.02
"""Least weight of the newest draft in an average."""

FIRST_ACCEPTANCE: Final = 0.7
"""Assumed before any draft."""

NUM_ASSUMED: Final = 8
"""How many drafts the assumption counts for: a mean of few drafts moves faster than one of many."""

LEAST_SEEN: Final = NUM_ASSUMED + 12
"""Drafts in the mean of a position before depths are compared by it: shallower steps would not learn more of it."""

TRIALS: Final = 3
"""Steps at a depth before its time counts: the first may be slow for other reasons."""

MAX_CHOICES: Final = 16
"""How often a depth without times is chosen in order to measure it."""

STEPS_BETWEEN_TRIALS: Final = 64
"""Least steps at the best depth before another one is tried again."""

TRIAL_STEPS: Final = 2

TRIAL_SHARE: Final = 0.005
"""The share of time that trials may cost."""

LEAST_GAIN: Final = 1.03
"""What another depth must gain in tokens per second before the best one is left: to change takes time, too."""

STEPS_TO_CHANGE: Final = 1.0
"""What it costs to leave the best depth and to return, in its steps: they wait for each other, and logs are folded."""


class DraftDepth:
    """Chooses the depth of a step.

    Args:
        max_depth: the largest.
        has_draft_layer: whether a step drafts what the next one verifies.
    """

    def __init__(self, max_depth: int, *, has_draft_layer: bool = False) -> None:
        self._max_depth = max_depth
        self._has_draft_layer = has_draft_layer
        self._accepted = [FIRST_ACCEPTANCE] * max_depth
        """By position, how often a draft after accepted ones was accepted."""
        self._nums_seen = [NUM_ASSUMED] * max_depth
        """By position, the drafts in that mean."""
        self._times: dict[int, list[_Times]] = {}
        """By the size of the batch and the depth."""
        self._best: dict[int, int] = {}
        """By the size of the batch."""
        self._loads: dict[int, _Load] = {}
        """By the size of the batch."""
        self._trial: int | None = None
        """The depth that is being tried; None: none is."""
        self._num_steps_left = STEPS_BETWEEN_TRIALS
        """Steps of the trial or, between trials, until the next one."""
        self._num_trials = 0

    def choose(self, num_running: int, *, is_timed: bool = True) -> int:
        """Return the depth of the next step.

        Args:
            num_running: sequences of the step, prompts included.
            is_timed: whether that is likely to be a step with decodes, whose time counts.
        """
        times = self._times_of(num_running)
        are_alone = any(time.num_values for time in times)
        nums_measured = [time.num_values if are_alone else len(time.mixed) for time in times]
        for depth, (time, num_measured) in enumerate(zip(times, nums_measured, strict=True)):
            is_unknown = num_measured < TRIALS or (depth == self._max_depth and self._nums_seen[-1] < LEAST_SEEN)
            if is_timed and is_unknown and time.num_choices < MAX_CHOICES:
                time.num_choices += 1
                return depth
        if not any(nums_measured):
            return 0
        tokens, seconds = self._expected_tokens(), _seconds_of(times)
        rows_per_token = self._load_of(num_running).rows_per_token if are_alone else 0.0
        costs = zip(seconds, tokens, _surcharges_of(times, seconds), strict=True)
        rates = [1 / (time / count + rows_per_token * surcharge) for time, count, surcharge in costs]
        size, best = num_running.bit_length(), max(range(len(rates)), key=rates.__getitem__)
        current = self._best.get(size, self._max_depth)
        if rates[best] <= LEAST_GAIN * rates[current]:
            best = current
        self._best[size] = best
        if not is_timed:
            return best
        if self._num_steps_left == 0:
            if self._trial is None:
                self._begin_trial(best)
            else:
                steps = TRIAL_STEPS * seconds[self._trial] / seconds[best]
                lost = STEPS_TO_CHANGE + steps * max(0.0, 1 - rates[self._trial] / rates[best])
                self._trial, self._num_steps_left = None, max(STEPS_BETWEEN_TRIALS, round(lost / TRIAL_SHARE))
        self._num_steps_left -= 1
        return best if self._trial is None else self._trial

    def _begin_trial(self, best: int) -> None:
        others = [depth for depth in sorted({0, best - 1, best + 1} - {best}) if 0 <= depth <= self._max_depth]
        self._trial, self._num_steps_left = others[self._num_trials % len(others)], TRIAL_STEPS
        self._num_trials += 1

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count the drafts of one sequence in one step."""
        for position in range(min(num_accepted + 1, num_drafted)):
            self._nums_seen[position] += 1
            weight = max(ACCEPTANCE_FADING, 1 / self._nums_seen[position])
            self._accepted[position] += weight * ((position < num_accepted) - self._accepted[position])

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Take the time of a step with decodes; its depth is their mean number of drafts."""
        decodes = [sequence for sequence in plan.sequences if sequence.is_verification]
        if not decodes:
            return
        num_drafts = sum(sequence.num_drafts for sequence in decodes)
        depth, num_rows = round(num_drafts / len(decodes)), plan.num_tokens - len(decodes) - num_drafts
        num_running = len(plan.sequences)
        self._load_of(num_running).add(num_rows, self._expected_tokens()[depth])
        if self._has_draft_layer:
            next_depth = round(sum(sequence.next_drafts for sequence in decodes) / len(decodes))
            if next_depth != depth:
                return
        time = self._times_of(num_running)[depth]
        if num_rows:
            time.mixed.append((num_rows, seconds))
        elif len(decodes) == num_running:
            time.add(seconds)

    def _load_of(self, num_running: int) -> "_Load":
        return self._loads.setdefault(num_running.bit_length(), _Load())

    def _times_of(self, num_running: int) -> "list[_Times]":
        return self._times.setdefault(num_running.bit_length(), [_Times() for _ in range(self._max_depth + 1)])

    def _expected_tokens(self) -> list[float]:
        expected, chance = [1.0], 1.0
        for rate in self._accepted:
            chance *= rate
            expected.append(expected[-1] + chance)
        return expected


def _seconds_of(times: "Sequence[_Times]") -> list[float]:
    """Return the time of each depth: where there is none, that of the depth below, and for depth 0 the longest.

    Steps of decodes alone count or, if there are none, those with prompts.
    """
    if any(time.num_values for time in times):
        values = [time.value if time.num_values else None for time in times]
    else:
        values = [time.mean_of_mixed for time in times]
    seconds = [max((value for value in values if value is not None), default=1.0)]
    for value in values:
        seconds.append(seconds[-1] if value is None else value)
    return seconds[1:]


def _surcharges_of(times: "Sequence[_Times]", seconds: Sequence[float]) -> list[float]:
    """Return how much longer steps of each depth take for each token of a prompt.

    Where that is unknown, it is 0: so depths are tried where prompts take much of the time.
    """
    return [time.surcharge(alone) or 0.0 for time, alone in zip(times, seconds, strict=True)]


class _Load:
    """How many tokens of prompts come with each token of a sequence."""

    __slots__ = ("_num_rows", "_num_tokens")

    def __init__(self) -> None:
        self._num_rows = self._num_tokens = 0.0

    def add(self, num_rows: int, num_tokens: float) -> None:
        self._num_rows += LOAD_FADING * (num_rows - self._num_rows)
        self._num_tokens += LOAD_FADING * (num_tokens - self._num_tokens)

    @property
    def rows_per_token(self) -> float:
        return self._num_rows / self._num_tokens if self._num_tokens else 0.0


class _Times:
    """The newest times of a depth."""

    __slots__ = ("_newest", "mixed", "num_choices", "num_values", "value")

    def __init__(self) -> None:
        self.num_values = 0
        self.num_choices = 0
        """How often the depth was chosen to be measured."""
        self._newest = deque[float](maxlen=NEWEST_TIMES)
        self.value = float("inf")
        """The least of those of decodes alone."""
        self.mixed = deque[tuple[int, float]](maxlen=NEWEST_MIXED)
        """How many tokens of prompts the newest steps computed that had some, and the times."""

    def add(self, value: float) -> None:
        self.num_values += 1
        self._newest.append(value)
        self.value = min(self._newest)

    @property
    def mean_of_mixed(self) -> float | None:
        """The mean time of steps that compute prompts; None: there were none."""
        return sum(seconds for _, seconds in self.mixed) / len(self.mixed) if self.mixed else None

    def surcharge(self, alone: float) -> float | None:
        """Return how much longer steps take for each token of a prompt; None: too few were measured.

        Args:
            alone: the time of a step of decodes alone.
        """
        if len(self.mixed) < TRIALS:
            return None
        num_rows = sum(count for count, _ in self.mixed)
        return max(0.0, sum(seconds - alone for _, seconds in self.mixed)) / num_rows
