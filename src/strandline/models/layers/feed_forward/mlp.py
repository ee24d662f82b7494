"""Feed-forward layers with a gated linear unit.

Shape suffixes: T tokens of the step, E hidden size, O rows of a fused projection.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from strandline.config_fields import Fields
from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand, weighed
from strandline.kernels.gemm.linear import LINEAR_OPERATIONS
from strandline.kernels.rowwise.activation import geglu, swiglu
from strandline.kernels.rowwise.quantized_rows import Rows
from strandline.kernels.rowwise.quantizing import with_quantized
from strandline.models.layers.parts.projection import GatedProjection, Projection, SummedProjection
from strandline.models.layers.parts.shard import Shard
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, sharded

MIN_LIMIT, MAX_LIMIT = 1e-3, 1e6


def read_limit(fields: Fields) -> float:
    """Read what gates and up projections are clamped to; raises as :class:`strandline.config_fields.Fields`."""
    return fields.number("swiglu_limit", at_least=MIN_LIMIT, at_most=MAX_LIMIT)


@dataclass(frozen=True, slots=True)
class GatedMlpConfig:
    """Sizes of the layer."""

    hidden_size: int
    intermediate_size: int
    limit: float | None = None
    """Gates and up projections are clamped to it; None: they are not."""

    @classmethod
    def read(cls, fields: Fields) -> "GatedMlpConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`."""
        return cls(fields.size("hidden_size"), fields.size("intermediate_size"))

    def part_of(self, shard: Shard) -> int:
        """Return the intermediate size of a shard; raises as :class:`strandline.models.layers.parts.shard.Shard`."""
        return shard.part_of(self.intermediate_size, "channels between a feed-forward part's projections")


class GatedMlp(nn.Module):
    """A feed-forward layer with a gated linear unit, whose channels are divided among shards."""

    operations = (*LINEAR_OPERATIONS, *with_quantized(swiglu))

    def __init__(self, config: GatedMlpConfig, site: Site) -> None:
        super().__init__()
        self.limit = config.limit
        hidden_size, size = config.hidden_size, config.part_of(site.shard)
        self.gate_up = GatedProjection(2 * size, hidden_size, site, shard=site.shard, num_parts=2)
        self.down = SummedProjection(hidden_size, size, site)
        self.shard = site.shard

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self.gate_up.takes_quantized

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._gate = self.gate_up.gate_for(self.down, kernels, self.limit)

    def forward(self, hidden_TE: Rows) -> Tensor:
        return self.down.multiply(self._gate(hidden_TE))

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors."""
        del names
        yield from gated_mlp_targets(self.gate_up, self.down, self.shard, prefix)


class ScaledGatedMlp(nn.Module):
    """A feed-forward layer with a gated linear unit, whose channels are divided among shards.

    Args:
        gate_multiplier: multiplies the gate before its activation.
        multiplier: multiplies the result.
    """

    operations = with_quantized(swiglu)

    def __init__(self, config: GatedMlpConfig, gate_multiplier: float, multiplier: float, site: Site) -> None:
        super().__init__()
        self.gate_multiplier, self.multiplier = gate_multiplier, multiplier
        self.shard, size = site.shard, config.part_of(site.shard)
        self.gate_up = Projection(2 * size, config.hidden_size, site)
        self.down = SummedProjection(config.hidden_size, size, site)

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self.gate_up.takes_quantized

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._swiglu = self.down.fed_by(swiglu, kernels)

    def forward(self, hidden_TE: Rows) -> Summand:
        activated = self._swiglu(self.gate_up.multiply(hidden_TE), None, self.gate_multiplier)
        return weighed(self.down.multiply(activated), self.multiplier)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from gated_mlp_targets(self.gate_up, self.down, self.shard, prefix)


class GeluMlp(nn.Module):
    """A feed-forward layer with a gated linear unit of gelu, whose channels are divided among shards."""

    operations = (geglu,)

    def __init__(self, config: GatedMlpConfig, site: Site, *, has_bias: bool) -> None:
        super().__init__()
        self.shard, size = site.shard, config.part_of(site.shard)
        sizes = (2 * size, config.hidden_size)
        self.gate_up = Projection(*sizes, site, has_bias=has_bias, shard=site.shard, num_parts=2)
        """Rows: gate, up."""
        self.down = SummedProjection(config.hidden_size, size, site, has_bias=has_bias)

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self.gate_up.takes_quantized

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._geglu = kernels[geglu]

    def forward(self, hidden_TE: Rows) -> Tensor:
        return self.down.multiply(self._geglu(self.gate_up.multiply(hidden_TE), is_tanh=True))

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        for kind, rows in {"weight": self.gate_up.weight_OI, "bias": self.gate_up.bias_O}.items():
            for name, part in zip(("gate_proj", "up_proj"), () if rows is None else rows.chunk(2), strict=False):
                yield f"{prefix}{name}.{kind}", sharded(part, self.shard)
        yield from self.down.targets(f"{prefix}down_proj.")


def gated_mlp_targets(gate_up: Projection, down: SummedProjection, shard: Shard, prefix: str) -> NamedTargets:
    """Yield the published tensors of a gate, an up and a down projection, the first two one above the other."""
    gate, up = gate_up.weight_OI.chunk(2)
    yield f"{prefix}gate_proj.weight", sharded(gate, shard)
    yield f"{prefix}up_proj.weight", sharded(up, shard)
    yield from down.targets(f"{prefix}down_proj.")
