"""What became of paths, by their age, and what keeping one for some time is worth by that.

Source: hit density as in LHD (Beckmann, Chen, Cidon, NSDI 2018); the best stopping time is Gittins' index.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from math import log
from typing import Final

EDGES: Final = (0, 1, 2, 3, *(round(2 ** (half / 2)) for half in range(4, 42)))
"""Ages at which bins begin, two to an octave; the last one has no end."""
WIDTHS: Final = (*(after - before for before, after in pairwise(EDGES)), EDGES[-1])

PRIOR_RETURNS: Final = tuple(
    0.15 * log((edge + width + 1) / (edge + 1)) for edge, width in zip(EDGES, WIDTHS, strict=True)
)
PRIOR_LOSSES: Final = tuple(0.3 * returns for returns in PRIOR_RETURNS)
"""Before anything is seen: the chance of a return falls with the age, as its inverse."""


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


def next_edge(age: int) -> int:
    """Return the age at which an age's bin ends."""
    index = bin_of(age) + 1
    return EDGES[index] if index < len(EDGES) else 2 * age
