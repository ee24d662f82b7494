"""Hyper-connections between several residual streams (``streams.py``), whose mixes are nearly doubly stochastic.

Of every token, the normalised streams give three mixes: one of the streams, which is the input of a part of a layer;
one of its output, which is added to each stream; and one of the streams that it is added to. The last one is made
doubly stochastic by some iterations of Sinkhorn's.

Mixes are computed in float64, for the reason in ``kernels/recurrences/kda.py``; torch runs them on all devices.

Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections"; ``transformers`` (``glm5_next``).

Shape suffixes: T tokens of the step, S streams, E hidden size, O the mixes of a token side by side.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from strandline.config_fields import MIN_EPS, Fields, read_eps
from strandline.kernels.binding import Kernels
from strandline.kernels.rowwise.norm import rms_norm
from strandline.models.layers.projection import Projection
from strandline.models.layers.site import Site
from strandline.models.layers.streams import MAX_STREAMS, Mixed
from strandline.models.layers.targets import NamedTargets, whole

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

    operations = (rms_norm,)

    def __init__(self, config: HyperConnectionsConfig, site: Site) -> None:
        super().__init__()
        self.config, num_streams = config, config.num_streams
        self.sizes = [num_streams, num_streams, num_streams**2]
        self.mix_proj = Projection(sum(self.sizes), num_streams * config.hidden_size, site.in_dtype(torch.float32))
        """Rows: mixes of the input, of the output, and of the streams."""
        self.bias_O = site.parameter(sum(self.sizes), dtype=torch.float32)
        self.scale_3 = site.parameter(3, dtype=torch.float32)
        self.norm_E = site.gain(config.hidden_size)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._rms_norm = kernels[rms_norm]

    def forward(self, stream_TSE: Tensor) -> Mixed:
        """Return the normalised input of the part, the mixed streams, and weights of what is added to them."""
        input_TS, output_TS, stream_TSS = self._mixes(stream_TSE)
        mixed_TE = (input_TS.unsqueeze(-1) * stream_TSE).sum(dim=1).to(stream_TSE.dtype)
        normed_TE = self._rms_norm(mixed_TE, self.norm_E, self.config.eps)
        dtype = stream_TSE.dtype
        return Mixed(normed_TE, stream_TSS.to(dtype).mT @ stream_TSE, output_TS.to(dtype).unsqueeze(-1))

    def _mixes(self, stream_TSE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mixes in float32; of those of the streams, each column makes one stream."""
        num_streams, eps = self.config.num_streams, self.config.mix_eps
        flat_TO = stream_TSE.flatten(1).float()
        normed_TO = flat_TO * torch.rsqrt(flat_TO.square().mean(-1, keepdim=True) + self.config.eps)
        parts = (x.split(self.sizes, dim=-1) for x in (self.mix_proj.multiply(normed_TO).double(), self.bias_O))
        logits = (x * scale + bias for x, bias, scale in zip(*parts, self.scale_3, strict=True))
        input_TO, output_TO, stream_TO = logits
        mix_TSS = stream_TO.unflatten(-1, (num_streams, num_streams)).softmax(-1) + eps
        mix_TSS = mix_TSS / (mix_TSS.sum(-2, keepdim=True) + eps)
        for _ in range(self.config.num_iterations - 1):
            mix_TSS = mix_TSS / (mix_TSS.sum(-1, keepdim=True) + eps)
            mix_TSS = mix_TSS / (mix_TSS.sum(-2, keepdim=True) + eps)
        return (input_TO.sigmoid() + eps).float(), (2 * output_TO.sigmoid()).float(), mix_TSS.float()

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors, except the norm's."""
        yield f"{prefix}fn", whole(self.mix_proj.weight_OI)
        yield f"{prefix}base", whole(self.bias_O)
        yield f"{prefix}scale", whole(self.scale_3)


class StreamMean(nn.Module):
    """The mean of the streams, normalised."""

    operations = (rms_norm,)

    def __init__(self, config: HyperConnectionsConfig, site: Site) -> None:
        super().__init__()
        self.eps = config.eps
        self.norm_E = site.gain(config.hidden_size)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._rms_norm = kernels[rms_norm]

    def forward(self, stream_TSE: Tensor) -> Tensor:
        return self._rms_norm(stream_TSE.mean(dim=1), self.norm_E, self.eps)
