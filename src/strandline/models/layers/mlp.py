"""A feed-forward layer with a gated linear unit.

Shape suffixes: T tokens of the step, E hidden size, F intermediate size.
"""

import torch
from torch import Tensor, nn

from strandline.kernels.binding import Kernels
from strandline.kernels.linear import gated_linear, linear
from strandline.models.layers.parameters import parameter
from strandline.models.targets import NamedTargets, whole


class GatedMlp(nn.Module):
    """A feed-forward layer with a gated linear unit."""

    operations = (gated_linear, linear)

    def __init__(
        self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.gate_up_FE = parameter(2 * intermediate_size, hidden_size, dtype=dtype, device=device)
        self.down_EF = parameter(hidden_size, intermediate_size, dtype=dtype, device=device)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._gated_linear, self._linear = kernels[gated_linear], kernels[linear]

    def forward(self, hidden_TE: Tensor) -> Tensor:
        return self._linear(self._gated_linear(hidden_TE, self.gate_up_FE), self.down_EF)

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors."""
        del names
        gate, up = self.gate_up_FE.chunk(2)
        yield f"{prefix}gate_proj.weight", whole(gate)
        yield f"{prefix}up_proj.weight", whole(up)
        yield f"{prefix}down_proj.weight", whole(self.down_EF)
