"""The ends of transfers that every rank carries out on its part of the bytes.

A transfer has ended when all ranks have reported it, and has failed if it failed on one: what it writes is neither used
nor freed before. Ranks report with the results of steps, in any order, so none waits for another.
"""

from collections.abc import Iterable, Sequence

from strandline.ids import TransferId
from strandline.records.actions import Completion


class JoinedCompletions:
    """What some ranks have reported and others have not."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._reports: dict[TransferId, dict[int, Completion]] = {}
        """By transfer and rank."""

    def add(self, reports: Sequence[Iterable[Completion]]) -> tuple[Completion, ...]:
        """Take in what each rank has reported; return the transfers that all ranks have reported by now."""
        ended = list[Completion]()
        for rank, completions in enumerate(reports):
            for completion in completions:
                by_rank = self._reports.setdefault(completion.transfer, {})
                by_rank[rank] = completion
                if len(by_rank) == self._num_ranks:
                    ended.append(_joined(self._reports.pop(completion.transfer).values()))
        return tuple(ended)

    def timeouts_s(self, timeout_s: float) -> list[float]:
        """Return how long to wait for each rank's next report: not at all for one that the others are behind."""
        late = {rank for by_rank in self._reports.values() for rank in range(self._num_ranks) if rank not in by_rank}
        return [timeout_s if rank in late or not late else 0.0 for rank in range(self._num_ranks)]


def _joined(completions: Iterable[Completion]) -> Completion:
    """Return the end of a transfer on all ranks: as long as the slowest took, and without what any has lost."""
    parts = list(completions)
    return Completion(
        parts[0].transfer,
        all(part.is_done for part in parts),
        max(part.seconds for part in parts),
        tuple(sorted({place for part in parts for place in part.lost})),
        next((part.cause for part in parts if part.cause), ""),
        min((part.max_free_bytes for part in parts if part.max_free_bytes is not None), default=None),
    )
