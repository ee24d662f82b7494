"""Returns and losses of paths by the time they were away, and the reuse rate that follows from them.

Source: hit density as in LHD (Beckmann, Chen, Cidon, NSDI 2018), maximised over stopping times as in Gittins' index.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from math import log
from typing import Final

BIN_EDGES: Final = (0, 1, 2, 3, *(round(2 ** (half / 2)) for half in range(4, 42)))
"""Ages (times away) at which bins begin, two per octave. The last bin has no end."""
BIN_WIDTHS: Final = (*(after - before for before, after in pairwise(BIN_EDGES)), BIN_EDGES[-1])

PRIOR_RETURNS: Final = tuple(
    0.15 * log((edge + width + 1) / (edge + 1)) for edge, width in zip(BIN_EDGES, BIN_WIDTHS, strict=True)
)
PRIOR_LOSSES: Final = tuple(0.3 * returns for returns in PRIOR_RETURNS)
"""Prior pseudo-counts: the hazard of a return falls as the inverse of the age."""


def age_bin(age: int) -> int:
    """Return the bin of an age."""
    return bisect_right(BIN_EDGES, age) - 1


class Outcomes:
    """Counts of returns and losses, by bin of the age at which they were observed."""

    def __init__(
        self, returns: Iterable[float] = (0.0,) * len(BIN_EDGES), losses: Iterable[float] = (0.0,) * len(BIN_EDGES)
    ) -> None:
        self.returns = list(returns)
        self.losses = list(losses)

    @property
    def total(self) -> float:
        return sum(self.returns) + sum(self.losses)

    def plus(self, other: "Outcomes", weight: float) -> "Outcomes":
        """Return the sum of these counts and ``weight`` times the other's."""
        return Outcomes(
            [mine + weight * theirs for mine, theirs in zip(self.returns, other.returns, strict=True)],
            [mine + weight * theirs for mine, theirs in zip(self.losses, other.losses, strict=True)],
        )

    def halve(self) -> None:
        self.returns = [count / 2 for count in self.returns]
        self.losses = [count / 2 for count in self.losses]

    def rates(self) -> list[float]:
        """Return the rate for each bin as the present age: returns per unit of time, for the best stopping age."""
        segments: list[tuple[float, float]] = []
        rates = [0.0] * len(BIN_EDGES)
        left = 0.0
        for index in range(len(BIN_EDGES) - 1, -1, -1):
            gone = self.returns[index] + self.losses[index]
            returns, time = self.returns[index], (left + gone / 2) * BIN_WIDTHS[index]
            left += gone
            while segments and segments[-1][0] * time >= returns * segments[-1][1]:
                more = segments.pop()
                returns, time = returns + more[0], time + more[1]
            segments.append((returns, time))
            rates[index] = returns / time
        return rates


PRIOR_RATES: Final = Outcomes(PRIOR_RETURNS, PRIOR_LOSSES).rates()


def next_bin_edge(age: int) -> int:
    """Return the age at which the bin of ``age`` ends; twice the age for the last bin."""
    index = bisect_right(BIN_EDGES, age)
    return BIN_EDGES[index] if index < len(BIN_EDGES) else 2 * age
