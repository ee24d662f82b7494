"""Hyper-connections between several residual streams (``streams.py``), computed by ``kernels/streams``.

Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections"; ``transformers`` (``glm5_next``).

Shape suffixes: as in ``hyper_connections.py``.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from strandline.config_fields import MIN_EPS, Fields, read_eps
from strandline.kernels.binding import Kernels
from strandline.kernels.streams.hyper_connections import HyperWeights, average_streams, connect_part
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.models.layers.streams.streams import MAX_STREAMS, Streams

MAX_ITERATIONS: Final = 1024


@dataclass(frozen=True, slots=True)
class HyperConnectionsConfig:
    """Sizes of the streams, and how they are mixed."""

    num_streams: int
    hidden_size: int
    num_iterations: int
    eps: float
    """Epsilon of norms."""
    mix_eps: float
    """Added to mixes, and to the sums that they are divided by."""

    @classmethod
    def read(cls, fields: Fields) -> "HyperConnectionsConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`."""
        return cls(
            num_streams=fields.size("hc_mult", at_most=MAX_STREAMS),
            hidden_size=fields.size("hidden_size"),
            num_iterations=fields.size("hc_sinkhorn_iters", at_most=MAX_ITERATIONS),
            eps=read_eps(fields),
            mix_eps=fields.number("hc_eps", at_least=MIN_EPS, at_most=1),
        )


class HyperConnection(nn.Module):
    """The mixes around a part of a layer, and the norm before that part."""

    operations = (connect_part,)

    def __init__(self, config: HyperConnectionsConfig, site: Site) -> None:
        super().__init__()
        self.config, num_streams = config, config.num_streams
        num_mixes = num_streams * (num_streams + 2)
        self.mix_OI = site.parameter(num_mixes, num_streams * config.hidden_size, dtype=torch.float32)
        self.bias_O = site.parameter(num_mixes, dtype=torch.float32)
        self.scale_3 = site.parameter(3, dtype=torch.float32)
        self.norm_E = site.gain(config.hidden_size)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        config = self.config
        self._connect_part = kernels[connect_part]
        self._weights = HyperWeights(
            *(self.mix_OI, self.bias_O, self.scale_3, self.norm_E),
            num_iterations=config.num_iterations,
            eps=config.eps,
            mix_eps=config.mix_eps,
        )

    def forward(self, stream: Streams) -> tuple[Tensor, Streams]:
        """Return the normalised input of the part, and the streams after the part before it."""
        input_TE, stream_TSE, mixes = self._connect_part(*stream, self._weights)
        return input_TE, Streams(stream_TSE, mixes)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors, except the norm's."""
        yield f"{prefix}fn", whole(self.mix_OI)
        yield f"{prefix}base", whole(self.bias_O)
        yield f"{prefix}scale", whole(self.scale_3)


class StreamMean(nn.Module):
    """The mean of the streams, normalised."""

    operations = (average_streams,)

    def __init__(self, config: HyperConnectionsConfig, site: Site) -> None:
        super().__init__()
        self.eps = config.eps
        self.norm_E = site.gain(config.hidden_size)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._average_streams = kernels[average_streams]

    def forward(self, stream: Streams) -> Tensor:
        return self._average_streams(*stream, self.norm_E, self.eps)
