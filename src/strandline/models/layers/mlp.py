"""A feed-forward layer with a gated linear unit.

Shape suffixes: T tokens of the step, E hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strandline.model_config import Fields
from strandline.models.layers.projection import GatedProjection, Projection
from strandline.models.targets import NamedTargets, whole


@dataclass(frozen=True, slots=True)
class GatedMlpConfig:
    """Sizes of the layer."""

    hidden_size: int
    intermediate_size: int

    @classmethod
    def read(cls, fields: Fields) -> "GatedMlpConfig":
        """Read a text configuration; raises as :class:`strandline.model_config.Fields`."""
        return cls(fields.size("hidden_size"), fields.size("intermediate_size"))


class GatedMlp(nn.Module):
    """A feed-forward layer with a gated linear unit."""

    def __init__(self, config: GatedMlpConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
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
