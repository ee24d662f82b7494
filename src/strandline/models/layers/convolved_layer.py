"""Layers whose parts' outputs are convolved over time before they are added to the residual stream.

Every rank convolves what all ranks together add.

Shape suffixes: T tokens of the step, C channels, W taps of the filter.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.recurrences.replay import ReplayLog
from strandline.models.layers.convolution import ResidualConvolution
from strandline.models.layers.decoder import DecoderLayer, FeedForwardT_co, MixerT_co
from strandline.models.layers.residual import Residual
from strandline.models.layers.site import Site
from strandline.specs import LayerSpec


@dataclass(frozen=True, slots=True)
class ConvolvedLayerMemory:
    """What the parts of a layer keep, as they take it."""

    mixer: Any
    mixer_window: tuple[Tensor, ReplayLog]
    mlp_window: tuple[Tensor, ReplayLog]


class ConvolvedLayer(DecoderLayer[MixerT_co, FeedForwardT_co]):
    """A mixer and a feed-forward part, each before a convolution; a family says how they are connected.

    Args:
        residuals: see ``DecoderLayer``.
        convolutions: convolutions of the mixer's output, and of the feed-forward part's.
    """

    def __init__(
        self,
        mixer: MixerT_co,
        mlp: FeedForwardT_co,
        residuals: tuple[Residual | None, Residual | None],
        convolutions: tuple[ResidualConvolution, ResidualConvolution],
    ) -> None:
        super().__init__(mixer, mlp, *residuals)
        self.mixer_conv, self.mlp_conv = convolutions

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        super().use_kernels(kernels)
        self._sum = kernels.ranks.sum

    @property
    def spec(self) -> LayerSpec:
        spec, convolutions = super().spec, (self.mixer_conv, self.mlp_conv)
        states, logged = zip(*((conv.window, conv.logged) for conv in convolutions), strict=True)
        return replace(spec, states=(*spec.states, *states), replay=(*spec.replay, *logged))

    def bind(self, memory: LayerMemory) -> ConvolvedLayerMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return ConvolvedLayerMemory(super().bind(memory), self.mixer_conv.bind(memory), self.mlp_conv.bind(memory))

    def replay(self, batch: StepBatch, memory: ConvolvedLayerMemory) -> None:
        """Advance the windows over logged tokens alone."""
        super().replay(batch, memory.mixer)
        self.mixer_conv.replay(batch, *memory.mixer_window)
        self.mlp_conv.replay(batch, *memory.mlp_window)


def convolutions_of_parts(
    hidden_size: int, num_taps: int, site: Site, scale: float = 1.0
) -> tuple[ResidualConvolution, ResidualConvolution]:
    """Return the convolutions of a mixer's and a feed-forward part's outputs.

    Args:
        scale: see ``ResidualConvolution``.
    """
    names = ("mixer_window", "mlp_window")
    first, second = (ResidualConvolution(name, hidden_size, num_taps, site, scale=scale) for name in names)
    return first, second
