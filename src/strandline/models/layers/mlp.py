"""A feed-forward layer with a gated linear unit.

Shape suffixes: T tokens of the step, E hidden size, O rows of a fused projection.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strandline.kernels.activation import swiglu
from strandline.kernels.binding import Kernels
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
        yield from _targets(self.gate_up, self.down, prefix)


class ScaledGatedMlp(nn.Module):
    """A feed-forward layer with a gated linear unit.

    Args:
        gate_multiplier: of the gate, before its activation.
        multiplier: of the result.
    """

    operations = (swiglu,)

    def __init__(
        self,
        config: GatedMlpConfig,
        gate_multiplier: float,
        multiplier: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.gate_multiplier, self.multiplier = gate_multiplier, multiplier
        self.gate_up = Projection(2 * config.intermediate_size, config.hidden_size, dtype, device)
        self.down = Projection(config.hidden_size, config.intermediate_size, dtype, device)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._swiglu = kernels[swiglu]

    def forward(self, hidden_TE: Tensor) -> Tensor:
        gate_up_TO = self.gate_up.multiply(hidden_TE)
        gate_up_TO.chunk(2, dim=-1)[0].mul_(self.gate_multiplier)
        return self.down.multiply(self._swiglu(gate_up_TO)).mul_(self.multiplier)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from _targets(self.gate_up, self.down, prefix)


def _targets(gate_up: Projection, down: Projection, prefix: str) -> NamedTargets:
    gate, up = gate_up.weight_OI.chunk(2)
    yield f"{prefix}gate_proj.weight", whole(gate)
    yield f"{prefix}up_proj.weight", whole(up)
    yield f"{prefix}down_proj.weight", whole(down.weight_OI)
