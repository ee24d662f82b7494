"""What parts of a layer leave to the operation after them: summands that have not been added up.

A norm, or a kernel that sums over ranks, reads every row once anyway. It can add up a token's choices of experts then:
their sum needs no launch of its own, and is not written and read again. A norm can do the same with parts that have
factors.

Shape suffixes: as in ``moe.py``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """What experts made of each token's choices, and what it takes to add them up."""

    out_AD: Tensor
    """Dense, in the order of the tokens; rows of choices that this rank's experts did not compute are undefined."""
    weights_TK: Tensor
    experts_TK: Tensor
    shared_TD: Tensor | None
    """What the shared expert made of each token; None: there is none."""
    shared_gate_T1: Tensor | None
    """Before its sigmoid; None: the shared expert's part is added as it is."""
    held: range | None
    """See ``ExpertWeights``."""
    add: Callable[["ExpertChoices"], Tensor]
    """Adds them up, in the dtype of ``out_AD``."""

    def __len__(self) -> int:
        return len(self.weights_TK)

    @property
    def like_sum(self) -> Tensor:
        """A tensor of the shape, dtype and layout that the sum of each token's choices has."""
        return self.out_AD[: len(self)]

    def split(self, num_tokens: int) -> Iterator["ExpertChoices"]:
        """Yield the choices of ``num_tokens`` tokens at a time."""
        top_k = self.weights_TK.shape[1]
        for start in range(0, len(self), num_tokens):
            tokens, choices = slice(start, start + num_tokens), slice(start * top_k, (start + num_tokens) * top_k)
            yield replace(
                self,
                out_AD=self.out_AD[choices],
                weights_TK=self.weights_TK[tokens],
                experts_TK=self.experts_TK[tokens],
                shared_TD=None if self.shared_TD is None else self.shared_TD[tokens],
                shared_gate_T1=None if self.shared_gate_T1 is None else self.shared_gate_T1[tokens],
            )


Part = Tensor | ExpertChoices
"""A summand without factors."""


@dataclass(frozen=True, slots=True)
class WeighedSum:
    """One part times a factor, or the sum of two."""

    first: Part
    factor: float
    second_TD: Tensor | None = None
    second_factor: float = 1.0


Summand = Part | WeighedSum
"""What a part of a layer adds to the residual stream, on this rank."""


def weighed(summand: Summand, factor: float) -> Summand:
    """Return a summand times a factor."""
    if factor == 1.0:
        return summand
    if isinstance(summand, WeighedSum):
        return replace(summand, factor=summand.factor * factor, second_factor=summand.second_factor * factor)
    return WeighedSum(summand, factor)


def added_up(summand: Summand) -> Tensor:
    """Return a summand as a tensor; tensors may be overwritten. With factors, sums are float32 and rounded once."""
    if isinstance(summand, WeighedSum):
        first_TD, second_TD = added_up(summand.first), summand.second_TD
        if second_TD is None:
            return first_TD.mul_(summand.factor)
        return first_TD.float().mul_(summand.factor).add_(second_TD, alpha=summand.second_factor).to(first_TD.dtype)
    return summand if isinstance(summand, Tensor) else summand.add(summand)


def without_factors(summand: Summand) -> Part:
    """Return a summand with its factors applied; sums over ranks take none."""
    return added_up(summand) if isinstance(summand, WeighedSum) else summand


def like(summand: Summand) -> Tensor:
    """Return a tensor of the shape, dtype and layout that a summand has as one."""
    if isinstance(summand, WeighedSum):
        summand = summand.first
    return summand if isinstance(summand, Tensor) else summand.like_sum
