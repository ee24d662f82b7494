"""Gates that mix several residual streams into the input of each part of a layer (``streams.py``).

Of every token a gate per channel weighs the normalised streams, whose mean is the input; a gate per stream weighs what
is added to it. A last mix of the streams is the final hidden state.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading.

Source: ``transformers`` (``qwen4_exp``, its hyper-connections).

Shape suffixes: T tokens of the step, S streams, E hidden size, R rank of the gate, O all streams side by side.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from strandline.config_fields import Fields, read_eps
from strandline.kernels.binding import Kernels
from strandline.kernels.streams.gates import add_gated_norm, mix_gated, silu_of_share
from strandline.models.layers.parts.projection import PROJECTION_ROWS, FusedProjection, Projection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.models.layers.streams.streams import MAX_STREAMS, Streams


@dataclass(frozen=True, slots=True)
class GatedStreamsConfig:
    """Sizes of the streams and of their gates."""

    num_streams: int
    hidden_size: int
    rank: int
    eps: float

    @classmethod
    def read(cls, fields: Fields) -> "GatedStreamsConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`."""
        num_streams = fields.size("hc_count", at_least=2, at_most=MAX_STREAMS)
        return cls(num_streams, fields.size("hidden_size"), fields.size("hc_lowrank"), read_eps(fields))


class GatedMix(nn.Module):
    """The gates before a part of a layer, or before the output head.

    Args:
        is_last: whether nothing is added to the streams after it.
    """

    operations = (add_gated_norm, silu_of_share, mix_gated)

    def __init__(self, config: GatedStreamsConfig, site: Site, *, is_last: bool = False) -> None:
        super().__init__()
        self.config, self.is_last = config, is_last
        num_streams, width = config.num_streams, config.num_streams * config.hidden_size
        self.norm_SE = site.parameter(num_streams, config.hidden_size)
        rows = (config.rank, 0 if is_last else num_streams)
        self.in_proj = FusedProjection(rows, width, site, multiple=PROJECTION_ROWS)
        """Rows: what the gate of channels is made of, the gate of streams, and zeros."""
        self.gate_proj = Projection(width, config.rank, site)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._add_gated_norm = kernels[add_gated_norm]
        self._silu_of_share, self._mix_gated = kernels[silu_of_share], kernels[mix_gated]

    def forward(self, stream: Streams) -> tuple[Tensor, Streams]:
        """Return the mix, and the streams with the output of the part before it."""
        config = self.config
        normed_TSE, stream_TSE = self._add_gated_norm(*stream, self.norm_SE, config.eps)
        low_TR, added_TS, _ = self.in_proj.project(normed_TSE.flatten(1))
        gate_TO = self.gate_proj.multiply(self._silu_of_share(low_TR, config.num_streams))
        return self._mix_gated(gate_TO, normed_TSE), Streams(stream_TSE, added_TS)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        low, added, _ = self.in_proj.weights
        yield f"{prefix}hc_norm.weight", whole(self.norm_SE.view(-1))
        yield f"{prefix}input_mix_weight_down.weight", whole(low)
        yield from self.gate_proj.targets(f"{prefix}input_mix_weight_up.")
        if not self.is_last:
            yield f"{prefix}block_inject_weight.weight", whole(added)


class LastGatedMix(nn.Module):
    """The gates before the output head."""

    def __init__(self, config: GatedStreamsConfig, site: Site) -> None:
        super().__init__()
        self.mix = GatedMix(config, site, is_last=True)

    def forward(self, stream: Streams) -> Tensor:
        mixed_TE: Tensor = self.mix(stream)[0]
        return mixed_TE

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from self.mix.targets(prefix)
