"""ZAYA: layers of convolved attention, each before a mixture of experts that takes one expert or none.

The residual stream, and what a part adds to it, are scaled and shifted by channel. Transformers keeps the stream in
float32, this model in the dtype of activations.

Source: ``transformers`` (``zaya``).

Shape suffixes: T tokens of the step, E hidden size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from strandline.config_fields import read_layer_types, read_max_position
from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand
from strandline.kernels.operation import Operation
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.convolved_attention import ConvolvedAttention, ConvolvedAttentionConfig
from strandline.models.layers.decoder import Decoder, DecoderLayer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.skipping_moe import RouterState, SkippingMoe, SkippingMoeConfig
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.models.layers.streams.residual import NormedResidual, PreNorm, ResidualNorm, Stream, rms

LAYER_TYPE: Final = "hybrid"
"""The only type of layer that is supported: the other has a window, and rotary frequencies of its own."""

Layer = DecoderLayer[ConvolvedAttention, SkippingMoe]


class ChannelScale(nn.Module):
    """What a vector of the stream is shifted, and then multiplied by."""

    def __init__(self, hidden_size: int, site: Site) -> None:
        super().__init__()
        self.scale_E = site.gain(hidden_size)
        self.bias_E = site.parameter(hidden_size)

    def forward(self, x_TE: Tensor) -> Tensor:
        return (x_TE + self.bias_E) * self.scale_E

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield f"{prefix}_scale", whole(self.scale_E)
        yield f"{prefix}_bias", whole(self.bias_E)


class ScaledStream(NormedResidual):
    """Parts read the normalised stream; the stream and what is added are scaled.

    Args:
        embedded: scales the stream first.
    """

    def __init__(
        self, norm: ResidualNorm, hidden_size: int, site: Site, *, embedded: ChannelScale | None = None
    ) -> None:
        super().__init__(norm, hidden_size, site)
        self.embedded = embedded
        self.added, self.stream = ChannelScale(hidden_size, site), ChannelScale(hidden_size, site)

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (self.norm.norm,)

    def connect(self, kernels: Kernels, part: object) -> None:
        """Compute with these kernels from now on."""
        del part
        self._norm, self._sum = kernels[self.norm.norm], kernels.ranks.sum

    def enter(self, stream: Stream) -> tuple[Tensor, Stream]:
        """Return the part's input, and the stream."""
        stream_TE = stream.settled(self._sum)
        if self.embedded is not None:
            stream_TE = self.embedded(stream_TE)
        return self._norm(stream_TE, self.norm_E, self.norm.eps), Stream(stream_TE)

    def add(self, out: Summand, stream: Stream) -> Stream:
        """Return the stream with the part's output, a summand of this rank."""
        return Stream(self.stream(stream.residual_TE), self.added(self._sum(out)))

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published scales."""
        yield from self.added.targets(f"{prefix}.hidden_states")
        yield from self.stream.targets(f"{prefix}.residual")


def build_zaya(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or the model is to be divided.
    """
    fields = config.text
    if fields.flag("lm_head_bias"):
        fields.reject("lm_head_bias", "false")
    num_layers = len(read_layer_types(fields, [LAYER_TYPE]))
    attention, moe = ConvolvedAttentionConfig.read(fields), SkippingMoeConfig.read(fields)
    rotary = rotary_frequencies(fields, layer_type=LAYER_TYPE)
    norm, hidden_size, state = rms(moe.eps), moe.hidden_size, RouterState()

    def build_layer(index: int) -> Layer:
        is_first = index == 0
        mixer, experts = ConvolvedAttention(attention, site), SkippingMoe(moe, state, site, is_first=is_first)
        embedded = ChannelScale(hidden_size, site) if is_first else None
        before_mixer = ScaledStream(norm, hidden_size, site, embedded=embedded)
        return DecoderLayer(mixer, experts, before_mixer, ScaledStream(norm, hidden_size, site))

    layers = [build_layer(index) for index in range(num_layers)]
    embedding = EmbeddingConfig.read(fields)
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, rotary, site)
    return CausalLM(decoder, read_max_position(fields), partial(_published, decoder, layers))


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        before_mixer, before_mlp = layer.mixer_residual, layer.mlp_residual
        assert isinstance(before_mixer, ScaledStream)
        assert isinstance(before_mlp, ScaledStream)
        if before_mixer.embedded is not None:
            yield from before_mixer.embedded.targets("model.input_hidden_states")
        yield f"{prefix}input_layernorm.weight", whole(before_mixer.norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(before_mlp.norm_E)
        yield from before_mixer.targets(f"{prefix}post_attention_residual_scale")
        yield from before_mlp.targets(f"{prefix}post_mlp_residual_scale")
        yield from mixer.targets(f"{prefix}self_attn.")
        yield from mlp.targets(f"{prefix}mlp.", names)
