"""Kimi Linear: three layers of Kimi Delta Attention, then one of latent attention, and so on; mostly experts.

No layer embeds positions.

Source: ``transformers`` (``kimi_linear``).
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from strandline.config_fields import read_eps, read_layer_types, read_max_position
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.latent_attention import LatentAttention, LatentAttentionConfig
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.feed_forward.sigmoid_moe import (
    SigmoidMoe,
    SigmoidMoeConfig,
    build_feed_forward,
    read_feed_forwards,
)
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, sharded, whole
from strandline.models.layers.recurrences.kimi_delta import KimiDeltaAttention, KimiDeltaAttentionConfig
from strandline.models.layers.streams.residual import PreNorm, rms

LAYER_TYPES: Final = ("full_attention", "linear_attention")

EXPERTS: Final = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Published names that differ from other families'."""

Layer = DecoderLayer[KimiDeltaAttention | LatentAttention, SigmoidMoe | GatedMlp]


def build_kimi_linear(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or does not go with another one.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    layer_types = read_layer_types(fields, LAYER_TYPES)
    if fields.value("q_lora_rank") is not None:
        fields.reject("q_lora_rank", "null")
    delta, latent = KimiDeltaAttentionConfig.read(fields), LatentAttentionConfig.read(fields)
    feed_forwards = read_feed_forwards(fields, len(layer_types))
    norm, hidden_size = rms(read_eps(fields)), latent.hidden_size

    def build_layer(kind: str, feed_forward: GatedMlpConfig | SigmoidMoeConfig) -> Layer:
        mixer = KimiDeltaAttention(delta, site) if kind == "linear_attention" else LatentAttention(latent, site)
        return pre_norm_layer(mixer, build_feed_forward(feed_forward, site), norm, hidden_size, site)

    layers = [build_layer(*kinds) for kinds in zip(layer_types, feed_forwards, strict=True)]
    embedding = EmbeddingConfig.read(fields)
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, None, site)
    return CausalLM(decoder, read_max_position(fields), partial(_published, decoder, layers))


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    yield from decoder.targets("model.", names)
    for index, layer in enumerate(layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        yield f"{prefix}input_layernorm.weight", whole(layer.mixer_norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(layer.mlp_norm_E)
        for name, target in mixer.targets(f"{prefix}self_attn."):
            if isinstance(mixer, KimiDeltaAttention) and name.endswith(".A_log"):
                yield name, sharded(mixer.A_log_H.view(1, 1, -1, 1), mixer.shard, dim=2)  # as it is broadcast
            else:
                yield name, target
        if isinstance(mlp, SigmoidMoe):
            yield from _expert_targets(mlp, f"{prefix}block_sparse_moe.", names)
            continue
        # In models saved by transformers, dense parts have the experts' name.
        is_resaved = f"{prefix}block_sparse_moe.gate_proj.weight" in names
        yield from mlp.targets(f"{prefix}{'block_sparse_moe' if is_resaved else 'mlp'}.", names)


def _expert_targets(moe: SigmoidMoe, prefix: str, names: frozenset[str]) -> NamedTargets:
    """Yield the tensors of experts; those of the shared ones have the usual names."""
    for target in moe.targets(prefix, names, "gate.e_score_correction_bias"):
        yield from renamed(iter([target]), EXPERTS if ".experts." in target[0] else {})
