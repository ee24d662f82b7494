"""Sums of few rows, and of many, that count themselves, for ranks that are threads."""

from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices, Summand, added_up, like
from strandline.kernels.ranks import FewRows, ManyRows, Ranks
from strandline.kernels.rowwise.norm import add_rms_norm, add_rms_norm_zero_centered


class CountingFewRows:
    """Sums of up to some rows, by way of ``ranks`` and the reference implementations."""

    def __init__(self, ranks: Ranks, max_rows: int) -> None:
        self._ranks, self._max_rows = ranks, max_rows
        self.num_add_norms = 0

    def can_sum(self, x: Tensor) -> bool:
        return len(x) <= self._max_rows

    def sum(self, x: Summand) -> Tensor:
        return self._ranks.sum(x)

    def can_gather(self, x: Tensor) -> bool:
        return len(x) <= self._max_rows

    def gather(self, x: Tensor) -> Tensor:
        return self._ranks.gather(x)

    def add_norm(
        self, x_TE: Summand, residual_TE: Tensor, weight_E: Tensor, eps: float, *, is_zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        self.num_add_norms += 1
        operation = add_rms_norm_zero_centered if is_zero_centered else add_rms_norm
        return operation.reference(self._ranks.sum(x_TE), residual_TE, weight_E, eps)


class CountingManyRows(CountingFewRows):
    """The same for more rows, and for choices of experts."""

    def can_add_norm(self, x_TE: Tensor) -> bool:
        return self.can_sum(x_TE)

    def can_sum(self, x: Summand) -> bool:
        return super().can_sum(like(x))


class FirstOfTwo:
    """One of two ranks, which has the whole model: the other one adds nothing. Counts choices that it sums."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.few_rows: FewRows | None = CountingFewRows(self, 0)
        self.many_rows: ManyRows | None = None
        self.num_choices = 0

    def sum(self, x: Summand) -> Tensor:
        self.num_choices += isinstance(x, ExpertChoices)
        return added_up(x)

    def gather(self, x: Tensor) -> Tensor:
        return x

    def least(self, number: int) -> int:
        return number
