"""Several residual streams, which are mixed into the input of each part of a layer, and which its output is added to.

All streams begin as the token's embedding, and a last mix of them is the final hidden state. How they are mixed is the
family's: by gates (``gated_streams.py``), or by hyper-connections (``hyper_connections.py``).

Shape suffixes: T tokens of the step, S streams, E hidden size.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor, nn

from strandline.errors import ConfigError
from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand
from strandline.kernels.operation import Operation
from strandline.models.layers.decoder import DecoderLayer, FeedForwardT_co, MixerT_co
from strandline.models.layers.ngram_features import NgramFeatures, NgramFeaturesMemory
from strandline.models.layers.step import Step
from strandline.models.layers.targets import NamedTargets
from strandline.specs import LayerSpec

MAX_STREAMS: Final = 64


class Mixed(NamedTuple):
    """What is made of the streams before a part of a layer."""

    mixed_TE: Tensor
    """Input of the part."""
    stream_TSE: Tensor
    """What its output is added to."""
    weight_TS1: Tensor
    """What its output is multiplied with, for each stream."""


class StreamMix(Protocol):
    """What mixes the streams before a part of a layer; a module."""

    def __call__(self, stream_TSE: Tensor) -> Mixed:
        """Mix them."""


class LastMix(Protocol):
    """What mixes the streams before the output head; a module."""

    def __call__(self, stream_TSE: Tensor) -> Tensor:
        """Return the final hidden state ``[T, E]``."""


class Streams(NamedTuple):
    """The streams within a step."""

    stream_TSE: Tensor
    weight_TS1: Tensor | None = None
    """What the output of the part that reads a mix of them is multiplied with, for each stream; None: no part does."""


class StreamsResidual(nn.Module):
    """A residual whose part reads a mix of the streams, and adds to each of them.

    Args:
        mix: normalises the streams, too.
    """

    def __init__(self, mix: StreamMix) -> None:
        super().__init__()
        self.mix = mix

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return ()

    def connect(self, kernels: Kernels, part: object) -> None:
        """Compute with these kernels from now on."""
        del part
        self._sum = kernels.ranks.sum

    def enter(self, stream: Streams) -> tuple[Tensor, Streams]:
        """Return the part's input, and the streams."""
        mixed_TE, stream_TSE, weight_TS1 = self.mix(stream.stream_TSE)
        return mixed_TE, Streams(stream_TSE, weight_TS1)

    def add(self, out: Summand, stream: Streams) -> Streams:
        """Return the streams with the part's output, a summand of this rank."""
        stream_TSE, weight_TS1 = stream
        assert weight_TS1 is not None
        return Streams(stream_TSE + self._sum(out).unsqueeze(1) * weight_TS1)


def mixes_of(layer: DecoderLayer[Any, Any]) -> tuple[StreamMix, StreamMix]:
    """Return what mixes the streams before the mixer, and before the feed-forward part."""
    before_mixer, before_mlp = layer.mixer_residual, layer.mlp_residual
    assert isinstance(before_mixer, StreamsResidual)
    assert isinstance(before_mlp, StreamsResidual)
    return before_mixer.mix, before_mlp.mix


class StreamsEnds(nn.Module):
    """Copies of the embedding at first; a last mix is the final hidden state.

    Args:
        last_mix: the family loads it.
    """

    def __init__(self, last_mix: LastMix, num_streams: int) -> None:
        super().__init__()
        self.last_mix, self.num_streams = last_mix, num_streams

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return ()

    def connect(self, kernels: Kernels, part: None = None) -> None:
        """Look up nothing: a mix looks up its operations itself.

        Raises:
            ConfigError: kernels have to be batch-invariant on a GPU, and the mixes are torch's.
        """
        if kernels.workload.is_deterministic and kernels.workload.device_type == "cuda":
            raise ConfigError(
                "--deterministic needs Triton kernels on a GPU: mixes of several residual streams run in torch, whose "
                "sums depend on the number of rows"
            )

    def begin(self, embedded_TE: Tensor) -> Streams:
        """Return the streams before the first layer."""
        return Streams(embedded_TE.unsqueeze(1).repeat(1, self.num_streams, 1))

    def leave(self, stream: Streams) -> Tensor:
        """Return the final, normalised hidden state."""
        return self.last_mix(stream.stream_TSE)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield nothing: names of the last mix are the family's."""
        del prefix
        yield from ()


@dataclass(frozen=True, slots=True)
class FeaturesLayerMemory:
    """What the parts of a layer keep, as they take it."""

    mixer: Any
    features: NgramFeaturesMemory


class FeaturesLayer(DecoderLayer[MixerT_co, FeedForwardT_co]):
    """A layer that first adds features of n-grams to the streams."""

    def __init__(
        self,
        mixer: MixerT_co,
        mlp: FeedForwardT_co,
        residuals: tuple[StreamsResidual, StreamsResidual],
        features: NgramFeatures,
    ) -> None:
        super().__init__(mixer, mlp, *residuals)
        self.features = features

    @property
    def spec(self) -> LayerSpec:
        return self.features.added_to(super().spec)

    def bind(self, memory: LayerMemory) -> FeaturesLayerMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return FeaturesLayerMemory(super().bind(self.features.without(memory)), self.features.bind(memory))

    def replay(self, batch: StepBatch, memory: FeaturesLayerMemory) -> None:
        """Advance the states over logged tokens alone."""
        super().replay(batch, memory.mixer)
        self.features.replay(batch, memory.features)

    def forward(self, stream: Streams, step: Step, memory: FeaturesLayerMemory) -> Streams:
        """Return the streams after the layer."""
        stream_TSE = stream.stream_TSE + self.features(stream.stream_TSE, step.batch, memory.features)
        after: Streams = super().forward(Streams(stream_TSE), step, memory.mixer)
        return after
