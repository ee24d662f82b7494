"""Mamba-2: a state space model in every layer, without attention and feed-forward parts.

The state of a context has a fixed size: prefix caching needs only snapshots, and positions have no limit. The residual
stream has the dtype of the activations, even if the configuration requests float32.

Source: ``transformers`` (``mamba2``).
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from strandline.config_fields import UNLIMITED_POSITION, read_eps, read_layer_types
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, whole
from strandline.models.layers.recurrences.mamba2 import Mamba2Config, Mamba2Layer, Mamba2Names
from strandline.models.layers.streams.residual import PreNorm, rms

NAMES: Final = Mamba2Names(
    num_heads="num_heads",
    head_dim="head_dim",
    state_dim="state_size",
    num_groups="n_groups",
    num_taps="conv_kernel",
    has_bias="use_bias",
    has_conv_bias="use_conv_bias",
)
LAYER_TYPES: Final = ("linear_attention",)

OLD_EMBEDDING: Final = "backbone.embedding.weight"

Layer = DecoderLayer[Mamba2Layer, None]


def build_mamba2(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    eps = read_eps(fields, "layer_norm_epsilon")
    mamba2, norm = Mamba2Config.read(fields, NAMES, eps), rms(eps)
    embedding = EmbeddingConfig.read(fields)
    layers = [
        pre_norm_layer(Mamba2Layer(mamba2, site), None, norm, mamba2.hidden_size, site)
        for _ in read_layer_types(fields, LAYER_TYPES)
    ]
    decoder = Decoder(layers, PreNorm(norm, mamba2.hidden_size, site), embedding, None, site)
    return CausalLM(decoder, UNLIMITED_POSITION, partial(_published, decoder, layers))


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    embedding = "embedding" if OLD_EMBEDDING in names else "embeddings"
    yield from renamed(decoder.targets("backbone.", names), {"embed_tokens": embedding, "norm": "norm_f"})
    for index, layer in enumerate(layers):
        prefix, mixer = f"backbone.layers.{index}.", layer.mixer
        yield f"{prefix}norm.weight", whole(layer.mixer_norm_E)
        yield from mixer.targets(f"{prefix}mixer.")
