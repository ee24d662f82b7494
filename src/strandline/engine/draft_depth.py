"""How many drafts pay: chosen at every step from the drafts accepted so far and from measured step times.

A step with ``d`` drafts for each decoding sequence gives each ``1 + r1 + r1 r2 + ...`` tokens, where ``ri`` is how
often draft ``i`` is accepted behind accepted ones, and takes the time that such steps took. The depth with the most
tokens per second is chosen. It is 0 where none pays: with many sequences, or few accepted drafts.

Times are kept for numbers of sequences within a factor of two. A depth is tried first where it has no times. Later the
neighbours of the best depth, and depth 0, are tried now and then: times change, and nothing is learned of drafts at
depth 0. How long the best one is kept in between follows from what a trial costs. Of the newest times the least counts,
for a few slow steps are no reason to leave a depth: prompts may have joined that were cached whole. Where few sequences
have drafts (n-grams), steps of a depth may never come about; its time is that of the depth below, then.

A draft layer drafts behind one step what the next one verifies. So the first step of another depth verifies as many as
the one before drafted: its time belongs to neither. A trial is two steps.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from strandline.records.plan import StepPlan

NEWEST_TIMES: Final = 8
"""How many measured times of a depth count, the newest ones."""

ACCEPTANCE_FADING: Final = 0.02
"""Weight of the newest draft in an average."""

FIRST_ACCEPTANCE: Final = 0.7
"""Assumed before any draft."""

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
        """By place, how often a draft behind accepted ones was accepted."""
        self._times: dict[int, list[_LeastTime]] = {}
        """By the size of the batch and the depth."""
        self._best: dict[int, int] = {}
        """By the size of the batch."""
        self._trial: int | None = None
        """The depth that is being tried; None: none is."""
        self._num_steps_left = STEPS_BETWEEN_TRIALS
        """Steps of the trial or, between trials, until the next one."""
        self._num_trials = 0

    def choose(self, num_decodes: int, *, is_timed: bool = True) -> int:
        """Return the depth of the next step.

        Args:
            is_timed: whether that is likely to be a step of decodes alone, whose time counts.
        """
        times = self._times_of(num_decodes)
        for depth, time in enumerate(times):
            if is_timed and time.num_values < TRIALS and time.num_choices < MAX_CHOICES:
                time.num_choices += 1
                return depth
        if not is_timed and not any(time.num_values for time in times):
            return 0
        seconds = _seconds_of(times)
        rates = [tokens / time for tokens, time in zip(self._expected_tokens(), seconds, strict=True)]
        size, best = num_decodes.bit_length(), max(range(len(rates)), key=rates.__getitem__)
        if rates[best] <= LEAST_GAIN * rates[self._best.get(size, 0)]:
            best = self._best.get(size, 0)
        self._best[size] = best
        if not is_timed:
            return best
        if self._num_steps_left == 0:
            if self._trial is None:
                self._begin_trial(best)
            else:
                steps = TRIAL_STEPS * seconds[self._trial] / seconds[best]
                lost = STEPS_TO_CHANGE + steps * (1 - rates[self._trial] / rates[best])
                self._trial, self._num_steps_left = None, max(STEPS_BETWEEN_TRIALS, round(lost / TRIAL_SHARE))
        self._num_steps_left -= 1
        return best if self._trial is None else self._trial

    def _begin_trial(self, best: int) -> None:
        others = [depth for depth in sorted({0, best - 1, best + 1} - {best}) if 0 <= depth <= self._max_depth]
        self._trial, self._num_steps_left = others[self._num_trials % len(others)], TRIAL_STEPS
        self._num_trials += 1

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count the drafts of one sequence in one step."""
        for place in range(min(num_accepted + 1, num_drafted)):
            self._accepted[place] += ACCEPTANCE_FADING * ((place < num_accepted) - self._accepted[place])

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Take the time of a step of decodes alone; its depth is the mean number of drafts."""
        num_sequences = len(plan.sequences)
        num_drafts = sum(sequence.num_drafts for sequence in plan.sequences)
        depth = round(num_drafts / num_sequences)
        if self._has_draft_layer:
            next_depth = round(sum(sequence.next_drafts for sequence in plan.sequences) / num_sequences)
            if next_depth != depth:
                return
        if plan.num_tokens == num_sequences + num_drafts:
            self._times_of(num_sequences)[depth].add(seconds)

    def _times_of(self, num_decodes: int) -> "list[_LeastTime]":
        return self._times.setdefault(num_decodes.bit_length(), [_LeastTime() for _ in range(self._max_depth + 1)])

    def _expected_tokens(self) -> list[float]:
        expected, chance = [1.0], 1.0
        for rate in self._accepted:
            chance *= rate
            expected.append(expected[-1] + chance)
        return expected


def _seconds_of(times: "Sequence[_LeastTime]") -> list[float]:
    """Return the time of each depth: where there is none, that of the depth below, and for depth 0 the longest."""
    seconds = [max((time.value for time in times if time.num_values), default=1.0)]
    for time in times:
        seconds.append(time.value if time.num_values else seconds[-1])
    return seconds[1:]


class _LeastTime:
    """The least of the newest times of a depth."""

    __slots__ = ("_newest", "num_choices", "num_values", "value")

    def __init__(self) -> None:
        self.num_values = 0
        self.num_choices = 0
        """How often the depth was chosen to be measured."""
        self._newest = deque[float](maxlen=NEWEST_TIMES)
        self.value = float("inf")

    def add(self, value: float) -> None:
        self.num_values += 1
        self._newest.append(value)
        self.value = min(self._newest)
