"""Nemotron-H and Nemotron 3: each layer is a Mamba-2 layer, attention, or a feed-forward part.

Feed-forward parts, dense or mixtures of experts, have no gate; experts may work on a projection of the hidden state.
Positions are not embedded. The draft layer of Nemotron 3 Super, Ultra and 3.5 Lightning is published as two such
layers, attention and a feed-forward part.

Time steps are clamped to ``time_step_limit``, as in the published implementation; transformers 5.17 clamps them to
``time_step_min``, which is meant for initialisation.

Shape suffixes: E hidden size.

Source: ``transformers`` (``nemotron_h``); of the draft layer vLLM (``nemotron_h_mtp``) and NVIDIA's NeMo AutoModel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from torch import Tensor

from strandline.architectures.nemotron_h import read_blocks
from strandline.config_fields import DTYPES, Fields, read_eps, read_layer_types, read_max_position
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.experts import MAX_EXPERTS
from strandline.models.layers.feed_forward.relu_squared import ReluSquaredMlp, ReluSquaredMoe, ReluSquaredMoeConfig
from strandline.models.layers.feed_forward.sigmoid_moe import read_routing
from strandline.models.layers.multi_token import DraftLayer
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, renamed, whole
from strandline.models.layers.recurrences.mamba2 import Mamba2Config, Mamba2Layer, Mamba2Names
from strandline.models.layers.streams.residual import PreNorm, rms

LAYER_TYPES: Final = ("full_attention", "linear_attention", "mlp", "moe")

DRAFT_LAYERS: Final = "num_nextn_predict_layers"
DRAFT_PARTS: Final = "mtp_layers_block_type"
ALTERNATIVE: Final = 'else try {"method": "ngram"}'

NAMES: Final = Mamba2Names(
    num_heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    state_dim="ssm_state_size",
    num_groups="n_groups",
    num_taps="conv_kernel",
    has_bias="use_bias",
    has_conv_bias="use_conv_bias",
)

Layer = DecoderLayer[Attention | Mamba2Layer | None, ReluSquaredMlp | ReluSquaredMoe | None]


def build_nemotron_h(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported, or does not go with another one.
    """
    fields = config.text
    fields.choice("mamba_hidden_act", ["silu"])
    fields.choice("mlp_hidden_act", ["relu2"])
    eps, state_dtype = read_eps(fields, "layer_norm_epsilon"), fields.choice("mamba_ssm_cache_dtype", DTYPES)
    attention = AttentionConfig.read(fields, QueryKeyNorm.NONE, eps=eps)
    mamba2 = replace(Mamba2Config.read(fields, NAMES, eps), state_dtype=state_dtype)
    layer_types, embedding = read_layer_types(fields, LAYER_TYPES), EmbeddingConfig.read(fields)
    mlp_size, has_bias = fields.size("intermediate_size"), fields.flag("mlp_bias")
    max_position = read_max_position(fields)
    norm, hidden_size = rms(eps), attention.hidden_size
    experts = {index: _read_experts(of_layer) for index, of_layer in _of_layers(fields, layer_types)}

    def build_layer(*kinds: str, experts: ReluSquaredMoeConfig | None) -> Layer:
        mixer: Attention | Mamba2Layer | None = None
        mlp: ReluSquaredMlp | ReluSquaredMoe | None = None
        for kind in kinds:
            if kind == "full_attention":
                mixer = Attention(attention, site)
            elif kind == "linear_attention":
                mixer = Mamba2Layer(mamba2, site)
            elif experts is not None and kind == "moe":
                mlp = ReluSquaredMoe(experts, site)
            else:
                mlp = ReluSquaredMlp(hidden_size, mlp_size, site, has_bias=has_bias)
        return pre_norm_layer(mixer, mlp, norm, hidden_size, site)

    def build_draft_layer() -> DraftLayer:
        kinds = _read_draft_parts(fields)
        parts = _of_layers(fields, kinds, "mtp_block_configs")
        layer = build_layer(*kinds, experts=next((_read_experts(part) for _, part in parts), None))
        return DraftLayer(layer, _published_draft_layer, norm, hidden_size, site)

    layers = [build_layer(kind, experts=experts.get(index)) for index, kind in enumerate(layer_types)]
    decoder = Decoder(layers, PreNorm(norm, hidden_size, site), embedding, None, site)
    has_draft_layer = fields.size(DRAFT_LAYERS, at_least=0, default=0) > 0
    published = partial(_published, decoder, layers)
    return CausalLM(decoder, max_position, published, build_draft_layer if has_draft_layer else None)


def _read_draft_parts(fields: Fields) -> tuple[str, ...]:
    """Return the kinds of a draft layer's published parts.

    Raises:
        ConfigError: there are several draft layers, or the parts are not attention and at most one feed-forward part.
            Data kept by other parts would not depend only on the token and the hidden state.
    """
    if fields.size(DRAFT_LAYERS) > 1:
        fields.reject(DRAFT_LAYERS, f"1, to draft with it; {ALTERNATIVE}")
    kinds = fields.list_of(DRAFT_PARTS, lambda entries, name: entries.choice(name, LAYER_TYPES))
    if kinds[:1] != ("full_attention",) or kinds[1:] not in ((), ("mlp",), ("moe",)):
        fields.reject(DRAFT_PARTS, f"full_attention, then mlp, moe or nothing, to draft with it; {ALTERNATIVE}")
    return kinds


def _of_layers(fields: Fields, kinds: Sequence[str], name: str = "block_configs") -> Iterator[tuple[int, Fields]]:
    """Yield the number and the fields of each layer with experts, which may differ from layer to layer."""
    blocks = [{}] * len(kinds) if fields.value(name) is None else read_blocks(fields, name)
    for index, (kind, block) in enumerate(zip(kinds, blocks, strict=True)):
        if kind == "moe":
            yield index, fields.replaced(block, f"{name}[{index}]")


def _read_experts(fields: Fields) -> ReluSquaredMoeConfig:
    num_experts = fields.size("n_routed_experts", at_most=MAX_EXPERTS)
    latent_size = fields.size("moe_latent_size") if fields.value("moe_latent_size") is not None else None
    return ReluSquaredMoeConfig(
        hidden_size=fields.size("hidden_size"),
        latent_size=latent_size,
        size=fields.size("moe_intermediate_size"),
        shared_size=fields.size("moe_shared_expert_intermediate_size"),
        has_bias=fields.flag("mlp_bias"),
        num_experts=num_experts,
        routing=read_routing(fields, num_experts),
    )


def _published(decoder: Decoder, layers: Sequence[Layer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    # Nemotron Puzzle has another prefix.
    prefix = "model." if any(name.startswith("model.layers.") for name in names) else "backbone."
    yield from renamed(decoder.targets(prefix, names), {"embed_tokens": "embeddings", "norm": "norm_f"})
    for index, layer in enumerate(layers):
        yield from _published_parts(layer, f"{prefix}layers.", index, names)


def _published_draft_layer(draft: DraftLayer, names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors of a draft layer: those of its inputs with its first part, its norm with its last."""
    first, last = "mtp.layers.0.", f"mtp.layers.{int(draft.layer.mlp is not None)}."
    yield f"{first}enorm.weight", whole(draft.embedding_norm_E)
    yield f"{first}hnorm.weight", whole(draft.hidden_norm_E)
    yield f"{first}eh_proj.weight", whole(draft.fc.weight_OI)
    yield f"{last}final_layernorm.weight", whole(draft.final.norm_E)
    yield from _published_parts(draft.layer, "mtp.layers.", 0, names)


def _published_parts(layer: Layer, prefix: str, first: int, names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors of a layer, each of whose parts is a layer there, numbered from ``first`` on."""
    parts: list[tuple[Attention | Mamba2Layer | ReluSquaredMlp | ReluSquaredMoe, Tensor]] = []
    if layer.mixer is not None:
        parts.append((layer.mixer, layer.mixer_norm_E))
    if layer.mlp is not None:
        parts.append((layer.mlp, layer.mlp_norm_E))
    for index, (part, norm_E) in enumerate(parts, first):
        yield f"{prefix}{index}.norm.weight", whole(norm_E)
        if isinstance(part, ReluSquaredMlp | ReluSquaredMoe):
            yield from part.targets(f"{prefix}{index}.mixer.", names)
        else:
            yield from part.targets(f"{prefix}{index}.mixer.")
