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

from strandline.config_fields import read_layer_types, read_max_position, read_vocab_size
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.operation import Operation
from strandline.model_config import ModelConfig
from strandline.models.causal_lm import CausalLM
from strandline.models.layers.convolved_attention import ConvolvedAttention, ConvolvedAttentionConfig
from strandline.models.layers.decoder import Decoder, DecoderLayer, ResidualNorm, plain
from strandline.models.layers.rotary import RotaryTable, rotary_frequencies
from strandline.models.layers.site import Site
from strandline.models.layers.skipping_moe import RouterState, SkippingMoe, SkippingMoeConfig
from strandline.models.layers.targets import NamedTargets, whole

LAYER_TYPE: Final = "hybrid"
"""The only type of layer that is supported: the other has a window, and rotary frequencies of its own."""


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


class ScaledStreamLayer(DecoderLayer):
    """Attention, then experts: each reads the normalised stream, and both the stream and what is added are scaled.

    Args:
        is_first: whether it reads the embeddings, which are scaled, too.
    """

    def __init__(
        self,
        mixer: ConvolvedAttention,
        mlp: SkippingMoe,
        norm: ResidualNorm,
        hidden_size: int,
        site: Site,
        *,
        is_first: bool,
    ) -> None:
        super().__init__(mixer, mlp, norm, hidden_size, site)
        self.embedded, *scales = (ChannelScale(hidden_size, site) for _ in range(5))
        self.mixed, self.mixer_stream, self.added, self.mlp_stream = scales
        self.is_first = is_first
        if not is_first:
            del self.embedded

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (self.norm.norm,)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._norm, self._sum = kernels[self.norm.norm], kernels.ranks.sum

    @property
    def leaves_sum(self) -> bool:
        return False

    @property
    def first_norm_E(self) -> None:
        return None

    def forward(
        self, normed_TE: Tensor, residual_TE: Tensor, rotary: RotaryTable | None, batch: StepBatch, memory: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what the experts add to the residual stream, and the stream without that."""
        del normed_TE  # the stream itself
        mixer, mlp, eps = self.mixer, self.mlp, self.norm.eps
        assert mixer is not None
        assert mlp is not None
        stream_TE = self.embedded(residual_TE) if self.is_first else residual_TE
        mixed_TE = mixer(self._norm(stream_TE, self.mixer_norm_E, eps), rotary, batch, memory)
        stream_TE = self.mixed(self._sum(mixed_TE)) + self.mixer_stream(stream_TE)
        added_TE = self._sum(mlp(self._norm(stream_TE, self.mlp_norm_E, eps)))
        return self.added(added_TE), self.mlp_stream(stream_TE)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors of norms and scales."""
        yield f"{prefix}input_layernorm.weight", whole(self.mixer_norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(self.mlp_norm_E)
        yield from self.mixed.targets(f"{prefix}post_attention_residual_scale.hidden_states")
        yield from self.mixer_stream.targets(f"{prefix}post_attention_residual_scale.residual")
        yield from self.added.targets(f"{prefix}post_mlp_residual_scale.hidden_states")
        yield from self.mlp_stream.targets(f"{prefix}post_mlp_residual_scale.residual")


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
    norm, hidden_size, state = plain(moe.eps), moe.hidden_size, RouterState()

    def build_layer(index: int) -> ScaledStreamLayer:
        is_first = index == 0
        mixer = ConvolvedAttention(attention, site)
        experts = SkippingMoe(moe, state, site, is_first=is_first)
        return ScaledStreamLayer(mixer, experts, norm, hidden_size, site, is_first=is_first)

    layers = [build_layer(index) for index in range(num_layers)]
    shape, is_tied = (read_vocab_size(fields), hidden_size), fields.flag("tie_word_embeddings")
    decoder = Decoder(layers, norm, rotary, shape, site, is_tied=is_tied)
    return CausalLM(decoder, read_max_position(fields), partial(_published, decoder, layers))


def _published(decoder: Decoder, layers: Sequence[ScaledStreamLayer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    yield from layers[0].embedded.targets("model.input_hidden_states")
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        yield from layer.targets(prefix)
        assert isinstance(mixer, ConvolvedAttention)
        yield from mixer.targets(f"{prefix}self_attn.")
        assert isinstance(mlp, SkippingMoe)
        yield from mlp.targets(f"{prefix}mlp.", names)
