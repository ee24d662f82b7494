"""Several residual streams, which are mixed into the input of each part of a layer, and which its output is added to.

All streams begin as the token's embedding, and a last mix of them is the final hidden state. How they are mixed is the
family's: by gates (``gated_streams.py``), or by hyper-connections (``hyper_connections.py``).

Shape suffixes: T tokens of the step, S streams, E hidden size, O all streams side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.operation import Operation
from strandline.models.layers.decoder import Decoder, DecoderLayer, FeedForward, Mixer, plain
from strandline.models.layers.ngram_features import NgramFeatures, NgramFeaturesMemory
from strandline.models.layers.protocol import ModelMemory
from strandline.models.layers.rotary import RotaryFrequencies, RotaryTable
from strandline.models.layers.site import Site
from strandline.models.layers.targets import NamedTargets
from strandline.specs import LayerSpec

MAX_STREAMS: Final = 64


class StreamsConfig(Protocol):
    """Sizes of the streams."""

    @property
    def num_streams(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def eps(self) -> float: ...


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


@dataclass(frozen=True, slots=True)
class StreamsLayerMemory:
    """What the parts of a layer keep, as they take it."""

    mixer: Any
    features: NgramFeaturesMemory | None


class StreamsLayer(DecoderLayer):
    """A mixer, then a feed-forward part, each on a mix of the streams; before them, features of n-grams are added.

    Args:
        mixes: before the mixer and before the feed-forward part.
        features: None: the layer has none.
    """

    def __init__(
        self,
        mixer: Mixer,
        mlp: FeedForward,
        mixes: tuple[StreamMix, StreamMix],
        features: NgramFeatures | None,
        config: StreamsConfig,
        site: Site,
    ) -> None:
        super().__init__(mixer, mlp, plain(config.eps), config.hidden_size, site)
        del self.mixer_norm_E, self.mlp_norm_E  # the streams are normalised while they are mixed
        self.features, self.num_streams = features, config.num_streams
        self.mixer_mix, self.mlp_mix = mixes

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return ()

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._sum = kernels.ranks.sum

    @property
    def leaves_sum(self) -> bool:
        return False

    @property
    def first_norm_E(self) -> None:
        return None

    @property
    def first_part(self) -> None:
        return None

    @property
    def spec(self) -> LayerSpec:
        return super().spec if self.features is None else self.features.added_to(super().spec)

    def bind(self, memory: LayerMemory) -> StreamsLayerMemory:
        """Return the layer's memory as ``forward`` takes it."""
        if self.features is None:
            return StreamsLayerMemory(super().bind(memory), None)
        return StreamsLayerMemory(super().bind(self.features.without(memory)), self.features.bind(memory))

    def replay(self, batch: StepBatch, memory: StreamsLayerMemory) -> None:
        """Advance the states over logged tokens alone."""
        super().replay(batch, memory.mixer)
        if self.features is not None:
            assert memory.features is not None
            self.features.replay(batch, memory.features)

    def forward(
        self,
        normed_TE: Tensor,
        residual_TE: Tensor,
        rotary: RotaryTable | None,
        batch: StepBatch,
        memory: StreamsLayerMemory,
    ) -> tuple[Tensor, Tensor]:
        """Return what the feed-forward part adds to the streams, which lie side by side, and these without it."""
        del normed_TE  # the streams themselves
        mixer, mlp, stream_TSE = self.mixer, self.mlp, residual_TE.unflatten(-1, (self.num_streams, -1))
        assert mixer is not None
        assert mlp is not None
        if self.features is not None:
            assert memory.features is not None
            stream_TSE = stream_TSE + self.features(stream_TSE, batch, memory.features)
        mixed_TE, stream_TSE, weight_TS1 = self.mixer_mix(stream_TSE)
        added_TE = self._sum(mixer(mixed_TE, rotary, batch, memory.mixer))
        stream_TSE = stream_TSE + added_TE.unsqueeze(1) * weight_TS1
        mixed_TE, stream_TSE, weight_TS1 = self.mlp_mix(stream_TSE)
        added_TE = self._sum(mlp(mixed_TE))
        return (added_TE.unsqueeze(1) * weight_TS1).flatten(1), stream_TSE.flatten(1)


class StreamsDecoder(Decoder):
    """Embedding, layers on several streams, a last mix of these, and output head.

    Args:
        last_mix: makes the final hidden state ``[T, E]`` of the streams ``[T, S, E]``; the family loads it.
        rotary: as of ``Decoder``.
    """

    def __init__(
        self,
        layers: Sequence[StreamsLayer],
        last_mix: LastMix,
        config: StreamsConfig,
        rotary: RotaryFrequencies | None,
        vocab_size: int,
        site: Site,
        *,
        is_tied: bool,
    ) -> None:
        shape = (vocab_size, config.hidden_size)
        super().__init__(layers, plain(config.eps), rotary, shape, site, is_tied=is_tied)
        del self.norm_E  # the streams are normalised while they are mixed
        self.num_streams = config.num_streams
        self.last_mix = last_mix

    @torch.no_grad()
    def forward(self, batch: StepBatch, memory: ModelMemory) -> Tensor:
        """Return the final hidden state of every row of the step, and advance the memory."""
        embedded_TE, rotary = self.embed(batch)
        stream_TO = embedded_TE.repeat(1, self.num_streams)
        for layer, layer_memory in zip(self._layers, memory.layers, strict=True):
            added_TO, stream_TO = layer(stream_TO, stream_TO, rotary, batch, layer_memory)
            stream_TO = added_TO.add_(stream_TO)
        return self.last_mix(stream_TO.unflatten(-1, (self.num_streams, -1)))

    def final_targets(self, prefix: str) -> NamedTargets:
        """Yield nothing: names of the last mix are the family's."""
        del prefix
        yield from ()
