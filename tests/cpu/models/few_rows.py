"""Sums of few rows, and of many, that count themselves, for ranks that are threads."""

from torch import Tensor

from strandline.kernels.norm import add_rms_norm, add_rms_norm_zero_centered
from tests.cpu.models.rank_threads import RankThread


class CountingFewRows:
    """Sums of up to some rows, by way of ``ranks`` and the reference implementations."""

    def __init__(self, ranks: RankThread, max_rows: int) -> None:
        self._ranks, self._max_rows = ranks, max_rows
        self.num_add_norms = 0

    def can_sum(self, x: Tensor) -> bool:
        return len(x) <= self._max_rows

    def sum(self, x: Tensor) -> Tensor:
        return self._ranks.sum(x)

    def can_gather(self, x: Tensor) -> bool:
        return len(x) <= self._max_rows

    def gather(self, x: Tensor) -> Tensor:
        return self._ranks.gather(x)

    def add_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, *, is_zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        self.num_add_norms += 1
        operation = add_rms_norm_zero_centered if is_zero_centered else add_rms_norm
        return operation.reference(self._ranks.sum(x_TE), residual_TE, weight_E, eps)


class CountingManyRows(CountingFewRows):
    """The same for more rows."""

    def can_add_norm(self, x_TE: Tensor) -> bool:
        return self.can_sum(x_TE)
