"""A feed-forward layer with a gated linear unit.

Shape suffixes: T tokens of the step, E hidden size.
"""

import torch
from torch import Tensor, nn

from strandline.models.layers.projection import GatedProjection, Projection
from strandline.models.targets import NamedTargets, whole


class GatedMlp(nn.Module):
    """A feed-forward layer with a gated linear unit."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.gate_up = GatedProjection(2 * intermediate_size, hidden_size, dtype, device)
        self.down = Projection(hidden_size, intermediate_size, dtype, device)

    def forward(self, hidden_TE: Tensor) -> Tensor:
        return self.down.multiply(self.gate_up.multiply(hidden_TE))

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors."""
        del names
        gate, up = self.gate_up.weight_OI.chunk(2)
        yield f"{prefix}gate_proj.weight", whole(gate)
        yield f"{prefix}up_proj.weight", whole(up)
        yield f"{prefix}down_proj.weight", whole(self.down.weight_OI)
