"""What LoRA adapters add to products: each row of a step may have another adapter, or none.

Shape suffixes: T rows of the step, I inputs, O outputs, S slots of adapters, R ranks of all parts of a weight, N
rows of one adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.linear import Linear
from strandline.kernels.operation import operation
from strandline.kernels.rowwise.quantized_rows import plain_rows

NO_SLOT = -1
"""The slot of rows without an adapter."""


class AdapterRows:
    """The rows of the step that is being computed which have each adapter. All projections of a model share one."""

    def __init__(self) -> None:
        self.groups: tuple[tuple[int, Tensor | None], ...] = ()
        """Slots, each with the numbers of its rows; None: all rows. Empty: no row has an adapter."""

    def begin_step(self, slots: Sequence[int], num_rows: Sequence[int], device: torch.device | str) -> None:
        """Note which rows have which adapter.

        Args:
            slots: of the step's sequences, in the order of their rows.
            num_rows: of each of them.
        """
        used = set(slots) - {NO_SLOT}
        if not used or len(set(slots)) == 1:
            self.groups = tuple((slot, None) for slot in used)
            return
        slot_T = torch.tensor(slots).repeat_interleave(torch.tensor(num_rows))
        self.groups = tuple((slot, (slot_T == slot).nonzero().flatten().to(device)) for slot in sorted(used))


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """The changes that adapters make to one weight, by slot."""

    down_SRI: Tensor
    up_SOR: Tensor


@operation()
def add_low_rank(out_TO: Tensor, x_TI: Tensor, weights: AdapterWeights, rows: AdapterRows) -> Tensor:
    """Add to every row what its adapter changes, in place; return the sum."""
    for slot, rows_N in rows.groups:
        down_RI, up_OR = weights.down_SRI[slot], weights.up_SOR[slot]
        if rows_N is None:
            return out_TO.addmm_(x_TI @ down_RI.mT, up_OR.mT)
        out_TO.index_add_(0, rows_N, x_TI[rows_N] @ down_RI.mT @ up_OR.mT)
    return out_TO


def with_adapters(kernels: Kernels, multiply: Linear, weights: AdapterWeights, rows: AdapterRows) -> Linear:
    """Return a product to which adapters add their changes; without any in the step, it is the same."""
    add = kernels[add_low_rank]
    return lambda x: add(multiply(x), plain_rows(x), weights, rows) if rows.groups else multiply(x)
