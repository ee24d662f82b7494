"""Counters of drafts: of one request, or of all."""

from strandline.records.events import SpeculationStats


class DraftCounters:
    """Counts drafts, and those that agreed with what was sampled.

    Args:
        draft_tokens: most drafts of a sequence in a step.
    """

    __slots__ = ("_accepted_by_position", "_num_draft_tokens", "_num_drafts")

    def __init__(self, draft_tokens: int) -> None:
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted_by_position = [0] * draft_tokens

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count the drafts of one sequence in one step."""
        self._num_drafts += 1
        self._num_draft_tokens += num_drafted
        for position in range(num_accepted):
            self._accepted_by_position[position] += 1

    def stats(self) -> SpeculationStats:
        """Return the counts so far."""
        return SpeculationStats(self._num_drafts, self._num_draft_tokens, tuple(self._accepted_by_position))
