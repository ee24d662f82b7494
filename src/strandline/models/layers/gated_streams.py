"""Several residual streams, which gates mix into the input of each part of a layer, and which its output is added to.

Of every token a gate per channel weighs the normalised streams, whose mean is the input; a gate per stream weighs what
is added to it. All streams begin as the token's embedding, and a last mix of them is the final hidden state.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading.

Source: ``transformers`` (``qwen4_exp``, its hyper-connections).

Shape suffixes: T tokens of the step, S streams, E hidden size, R rank of the gate, O all streams side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.norm import rms_norm_heads_zero_centered
from strandline.kernels.operation import Operation
from strandline.model_config import Fields, read_eps
from strandline.models.layers.decoder import Decoder, DecoderLayer, FeedForward, Mixer, zero_centered
from strandline.models.layers.moe import PROJECTION_ROWS
from strandline.models.layers.ngram_features import NgramFeatures, NgramFeaturesMemory
from strandline.models.layers.parameters import parameter
from strandline.models.layers.projection import Projection
from strandline.models.layers.rotary import RotaryFrequencies, RotaryTable
from strandline.models.protocol import ModelMemory
from strandline.models.shard import WHOLE, Shard
from strandline.models.targets import NamedTargets, whole
from strandline.specs import LayerSpec

MAX_STREAMS: Final = 64


@dataclass(frozen=True, slots=True)
class GatedStreamsConfig:
    """Sizes of the streams and of their gates."""

    num_streams: int
    hidden_size: int
    rank: int
    eps: float

    @classmethod
    def read(cls, fields: Fields) -> "GatedStreamsConfig":
        """Read a text configuration; raises as :class:`strandline.model_config.Fields`."""
        num_streams = fields.size("hc_count", at_least=2, at_most=MAX_STREAMS)
        return cls(num_streams, fields.size("hidden_size"), fields.size("hc_lowrank"), read_eps(fields))


class StreamMix(nn.Module):
    """The gates before a part of a layer, or before the output head.

    Args:
        is_last: whether nothing is added to the streams behind it.
    """

    def __init__(
        self, config: GatedStreamsConfig, dtype: torch.dtype, device: torch.device | str, *, is_last: bool = False
    ) -> None:
        super().__init__()
        self.config, self.is_last = config, is_last
        num_streams, width = config.num_streams, config.num_streams * config.hidden_size
        self.norm_SE = parameter(num_streams, config.hidden_size, dtype=dtype, device=device)
        self.sizes = [config.rank, 0 if is_last else num_streams]
        self.sizes.append(-sum(self.sizes) % PROJECTION_ROWS)
        self.in_proj = Projection(sum(self.sizes), width, dtype, device)
        """Rows: what the gate of channels is made of, the gate of streams, and zeros."""
        self.in_proj.weight_OI[len(self.in_proj.weight_OI) - self.sizes[-1] :].zero_()
        self.gate_proj = Projection(width, config.rank, dtype, device)

    def forward(self, stream_TSE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mix ``[T, E]``, and weights ``[T, S, 1]`` of what is added to the streams."""
        num_streams = self.config.num_streams
        normed_TSE = rms_norm_heads_zero_centered(stream_TSE, self.norm_SE, self.config.eps)
        low_TR, added_TS, _ = self.in_proj.multiply(normed_TSE.flatten(1)).split(self.sizes, dim=-1)
        gate_TO = self.gate_proj.multiply(F.silu(low_TR / num_streams))
        mixed_TE = gate_TO.sigmoid_().view_as(normed_TSE).mul_(normed_TSE).mean(dim=1)
        return mixed_TE, (added_TS / num_streams).sigmoid_().mul_(2).unsqueeze(-1)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        low, added, _ = self.in_proj.weight_OI.split(self.sizes)
        yield f"{prefix}hc_norm.weight", whole(self.norm_SE.view(-1))
        yield f"{prefix}input_mix_weight_down.weight", whole(low)
        yield from self.gate_proj.targets(f"{prefix}input_mix_weight_up.")
        if not self.is_last:
            yield f"{prefix}block_inject_weight.weight", whole(added)


@dataclass(frozen=True, slots=True)
class StreamsLayerMemory:
    """What the parts of a layer keep, as they take it."""

    mixer: Any
    features: NgramFeaturesMemory | None


class StreamsLayer(DecoderLayer):
    """A mixer, then a feed-forward part, each on a mix of the streams; before them, features of n-grams are added.

    Args:
        features: None: the layer has none.
    """

    def __init__(
        self,
        mixer: Mixer,
        mlp: FeedForward,
        features: NgramFeatures | None,
        config: GatedStreamsConfig,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(mixer, mlp, zero_centered(config.eps), config.hidden_size, dtype, device)
        del self.mixer_norm_E, self.mlp_norm_E  # the streams are normalised while they are mixed
        self.features, self.num_streams = features, config.num_streams
        self.mixer_mix, self.mlp_mix = (StreamMix(config, dtype, device) for _ in range(2))

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
        mixed_TE, weight_TS1 = self.mixer_mix(stream_TSE)
        added_TE = self._sum(mixer(mixed_TE, rotary, batch, memory.mixer))
        stream_TSE = stream_TSE + added_TE.unsqueeze(1) * weight_TS1
        mixed_TE, weight_TS1 = self.mlp_mix(stream_TSE)
        added_TE = self._sum(mlp(mixed_TE))
        return (added_TE.unsqueeze(1) * weight_TS1).flatten(1), stream_TSE.flatten(1)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors of the gates."""
        yield from self.mixer_mix.targets(f"{prefix}attn_hyper_connection.")
        yield from self.mlp_mix.targets(f"{prefix}mlp_hyper_connection.")


class StreamsDecoder(Decoder):
    """Embedding, layers on several streams, a last mix of these, and output head."""

    def __init__(
        self,
        layers: Sequence[StreamsLayer],
        config: GatedStreamsConfig,
        rotary: RotaryFrequencies,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        is_tied: bool,
        shard: Shard = WHOLE,
    ) -> None:
        shape = (vocab_size, config.hidden_size)
        super().__init__(layers, zero_centered(config.eps), rotary, shape, dtype, device, is_tied=is_tied, shard=shard)
        del self.norm_E  # the streams are normalised while they are mixed
        self.num_streams = config.num_streams
        self.last_mix = StreamMix(config, dtype, device, is_last=True)

    @torch.no_grad()
    def forward(self, batch: StepBatch, memory: ModelMemory) -> Tensor:
        """Return the final hidden state of every row of the step, and advance the memory."""
        embedded_TE, rotary = self.embed(batch)
        stream_TO = embedded_TE.repeat(1, self.num_streams)
        for layer, layer_memory in zip(self._layers, memory.layers, strict=True):
            added_TO, stream_TO = layer(stream_TO, stream_TO, rotary, batch, layer_memory)
            stream_TO = added_TO.add_(stream_TO)
        hidden_TE: Tensor
        hidden_TE, _ = self.last_mix(stream_TO.unflatten(-1, (self.num_streams, -1)))
        return hidden_TE

    def final_targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors behind the last layer, except the head's."""
        yield from self.last_mix.targets(f"{prefix}hyper_connection_mixer.")
