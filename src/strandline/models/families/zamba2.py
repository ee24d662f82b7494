"""Zamba2: Mamba-2 layers; every few of them use a transformer block that they share, each with adapters of its own.

Time steps have no limits, as in the published implementation; transformers 5.17 raises those of prompts to
``time_step_min``, which was meant for training's start.

Source: ``transformers`` (``zamba2``).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from torch import Tensor

from strandline.config_fields import Fields, read_layer_types, read_max_position
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.parts.rotary import rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, whole
from strandline.models.layers.recurrences.mamba2 import Mamba2Config, Mamba2Layer, Mamba2Names
from strandline.models.layers.shared_block import SharedBlock, SharedBlockConfig, SharedBlockUse
from strandline.models.layers.streams.residual import PreNorm, Unnormed, rms

LAYER_TYPES: Final = ("hybrid", "linear_attention")

NAMES: Final = Mamba2Names(
    num_heads="n_mamba_heads",
    head_dim="mamba_headdim",
    num_groups="mamba_ngroups",
    has_bias="add_bias_linear",
    has_conv_bias="use_conv_bias",
)
GATED_NORM_EPS: Final = 1e-5
"""Epsilon of the Mamba-2 layers' norm, independent of the other norms'."""

Layer = DecoderLayer[Mamba2Layer | SharedBlockUse, None]


def build_zamba2(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or does not go with another one.
    """
    fields = config.text
    layer_types, block = read_layer_types(fields, LAYER_TYPES), _read_block(fields)
    mamba2 = replace(Mamba2Config.read(fields, NAMES, GATED_NORM_EPS), has_conv_bias=True)
    rotary = rotary_frequencies(fields) if fields.flag("use_mem_rope") else None
    hidden_size = block.attention.hidden_size
    embedding = EmbeddingConfig.read(fields)
    max_position, norm = read_max_position(fields), rms(block.attention.eps)
    num_blocks = min(fields.size("num_mem_blocks"), layer_types.count("hybrid"))
    blocks = [SharedBlock(block, site) for _ in range(num_blocks)]

    def embed(token_ids_T: Tensor) -> Tensor:
        return decoder.embedding.rows(token_ids_T)

    def build_layer(index: int, kind: str) -> Layer:
        mamba = Mamba2Layer(mamba2, site)
        if kind == "linear_attention":
            return pre_norm_layer(mamba, None, norm, hidden_size, site)
        use = layer_types[:index].count("hybrid")
        return DecoderLayer(SharedBlockUse(blocks[use % num_blocks], mamba, norm, embed, site), None, Unnormed(), None)

    layers = [build_layer(index, kind) for index, kind in enumerate(layer_types)]
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, rotary, site)
    return CausalLM(decoder, max_position, partial(_published, decoder, layers, blocks))


def _read_block(fields: Fields) -> SharedBlockConfig:
    fields.choice("hidden_act", ["gelu"])
    attention = AttentionConfig.read(fields, QueryKeyNorm.NONE, has_bias=False)
    scale, input_size = (attention.head_dim / 2) ** -0.5, 2 * attention.hidden_size
    return SharedBlockConfig(
        replace(attention, scale=scale, input_size=input_size),
        intermediate_size=fields.size("intermediate_size"),
        has_bias=fields.flag("add_bias_linear"),
        rank=fields.size("adapter_rank"),
        has_attention_adapters=fields.flag("use_shared_attention_adapter"),
    )


def _published(
    decoder: Decoder, layers: Sequence[Layer], blocks: Sequence[SharedBlock], names: frozenset[str]
) -> NamedTargets:
    """Yield the published tensors; a block is published with the first layer that uses it."""
    yield from renamed(decoder.targets("model.", names), {"norm": "final_layernorm"})
    block_prefixes = list[str]()
    num_uses = 0
    for index, layer in enumerate(layers):
        prefix, mixer = f"model.layers.{index}.", layer.mixer
        if isinstance(mixer, Mamba2Layer):
            yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
            yield from mixer.targets(f"{prefix}mamba.")
            continue
        if num_uses < len(blocks):
            block_prefixes.append(f"{prefix}shared_transformer.")
            is_shared = num_uses + len(blocks) < sum(isinstance(each.mixer, SharedBlockUse) for each in layers)
            for name, target in blocks[num_uses].targets(block_prefixes[-1]):
                yield name, replace(target, is_shared=is_shared)
        yield f"{prefix}mamba_decoder.input_layernorm.weight", whole(mixer.norm_E)
        yield from mixer.targets(prefix, block_prefixes[num_uses % len(blocks)], num_uses)
        num_uses += 1
