"""Inkling 2: layers of attention with a window, then one of full attention, and so on, before mixtures of experts.

Parts read mixes of blocks of layers (``layers/streams/blocks.py``). What attention and the experts add passes a short
convolution each, in addition to the one inside attention (``layers/attention/clipped_attention.py``).

Of multimodal models the text part is built; the vision tower's tensors are recognised and skipped.

Source: ``transformers`` (``inkling2``).

Shape suffixes: T tokens of the step, E hidden size, Q inputs of a part of a layer (one, or those of queries, keys and
values), X experts, F intermediate size, Z tokens of this rank's embedding.
"""

from collections.abc import Sequence
from functools import partial
from math import ceil, sqrt
from typing import Final

import torch

from strandline.config_fields import (
    MAX_LAYERS,
    Fields,
    read_eps,
    read_layer_types,
    read_max_position,
    read_vocab_size,
)
from strandline.kernels.experts.moe import Activation
from strandline.kernels.experts.router import Routing
from strandline.kernels.rowwise.activation import capped_swiglu
from strandline.kernels.streams.block_mixes import OpenBlock
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.families.inkling import LAYER_TYPES, PUBLISHED, SLIDING
from strandline.models.layers.attention.clipped_attention import ClippedAttention, ClippedAttentionConfig
from strandline.models.layers.decoder import Decoder, DecoderLayer, LayerStates
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.experts import MAX_EXPERTS, alternating
from strandline.models.layers.feed_forward.sigmoid_moe import MAX_SCALE, ROUTER_EPS, SigmoidMoe, SigmoidMoeConfig
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, spanned, whole
from strandline.models.layers.streams.blocks import BlockEnds, BlockReader, BlockStream
from strandline.models.layers.streams.output_convolutions import OutputConvolutions

MAX_CAP: Final = 1e6


class BlockLayer(DecoderLayer[ClippedAttention, SigmoidMoe]):
    """Attention, then experts, whose outputs are convolved and added to the block under way.

    Args:
        begins_block: whether attention's output begins a block.
        readers: readers of attention and of the experts.
    """

    def __init__(
        self,
        mixer: ClippedAttention,
        mlp: SigmoidMoe,
        readers: tuple[BlockReader, BlockReader],
        hidden_size: int,
        site: Site,
        *,
        begins_block: bool,
    ) -> None:
        num_taps = mixer.config.relative.num_taps
        convs = OutputConvolutions(hidden_size, num_taps, site, 1 / sqrt(num_taps + 1))
        super().__init__(mixer, mlp, None, None, stateful=convs)
        self.convs = convs
        self.begins_block, self.dtype = begins_block, site.dtype
        self.mixer_reader, self.mlp_reader = readers

    def forward(self, stream: BlockStream, step: Step, memory: LayerStates) -> BlockStream:
        """Return the blocks after the layer."""
        batch, windows = step.batch, memory.other
        inputs_QTE, block_TE = self.mixer_reader(stream, self.dtype)
        mixed_TE = self.convs.of_mixer(self.mixer(inputs_QTE, step, memory.mixer), batch, windows)
        if self.begins_block:
            stream = stream.finished(block_TE)
        stream = stream._replace(block=OpenBlock(None if self.begins_block else block_TE, mixed_TE))
        # Within a layer the sum is not rounded.
        inputs_QTE, block_TE = self.mlp_reader(stream, torch.float32)
        fed_TE = self.convs.of_mlp(self.mlp(inputs_QTE[0]), batch, windows)
        return stream._replace(block=OpenBlock(block_TE, fed_TE))

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors, except the queries of readers."""
        yield from self.mixer.targets(f"{prefix}attn.")
        norm_QE = self.mixer_reader.norm_QE
        names = ["attn_norm"] if len(norm_QE) == 1 else [f"{name}_input_norm" for name in ("q", "k", "v")]
        for name, norm_E in zip(names, norm_QE, strict=True):
            yield f"{prefix}{name}.weight", whole(norm_E)
        yield f"{prefix}mlp_norm.weight", whole(self.mlp_reader.norm_QE[0])
        yield f"{prefix}attn_sconv.weight", whole(self.convs.mixer.filter.taps_CW.unsqueeze(1))
        yield f"{prefix}mlp_sconv.weight", whole(self.convs.mlp.filter.taps_CW.unsqueeze(1))
        experts, bias_X = self.mlp.experts, self.mlp.bias_X
        assert bias_X is not None
        held, num = experts.held, experts.config.num_experts
        yield f"{prefix}mlp.gate.weight", whole(self.mlp.router.weight_OI)
        yield f"{prefix}mlp.gate.bias", whole(bias_X)
        yield f"{prefix}mlp.experts.w13_weight", alternating(experts.up_XFE, held, num)
        yield f"{prefix}mlp.experts.w2_weight", spanned(experts.down_XEF, held, num)


def build_inkling2(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    fields = config.text
    fields.choice("hidden_act", ["silu"])
    fields.choice("scoring_func", ["sigmoid"])
    layer_types = read_layer_types(fields, LAYER_TYPES)
    attention = {kind: ClippedAttentionConfig.read(fields, is_sliding=kind == SLIDING) for kind in set(layer_types)}
    moe, eps, hidden_size = _read_moe(fields), read_eps(fields), fields.size("hidden_size")
    block_layers = fields.size("n_layers_per_attn_res_block", at_most=MAX_LAYERS)
    num_published = read_vocab_size(fields)
    vocab_size = fields.size("unpadded_vocab_size", at_most=num_published)
    max_position, cap = read_max_position(fields), _read_cap(fields, "final_logit_softcapping")

    def build_layer(index: int, kind: str) -> BlockLayer:
        num_inputs = 1 if kind == SLIDING else 3
        readers = (
            BlockReader(hidden_size, eps, site, num_inputs=num_inputs, has_blocks=index > 0),
            BlockReader(hidden_size, eps, site),
        )
        mixer, begins_block = ClippedAttention(attention[kind], site), index % block_layers == 0
        return BlockLayer(mixer, SigmoidMoe(moe, site), readers, hidden_size, site, begins_block=begins_block)

    layers = [build_layer(index, kind) for index, kind in enumerate(layer_types)]
    ends = BlockEnds(hidden_size, eps, ceil(len(layers) / block_layers), site)
    embedding = EmbeddingConfig(
        vocab_size, hidden_size, is_tied=False, num_published=num_published, logits_soft_cap=cap
    )
    decoder = Decoder(layers, ends, embedding, None, site)
    return CausalLM(decoder, max_position, partial(_published, decoder, ends, layers))


def _read_cap(fields: Fields, name: str) -> float:
    return fields.number(name, at_least=1e-3, at_most=MAX_CAP)


def _read_moe(fields: Fields) -> SigmoidMoeConfig:
    num_experts = fields.size("n_routed_experts", at_most=MAX_EXPERTS)
    top_k = fields.size("num_experts_per_tok", at_most=num_experts)
    scale = fields.number("route_scale", at_least=0, at_most=MAX_SCALE)
    gate_cap, up_cap = (_read_cap(fields, f"mlp_{name}_softcap") for name in ("gate", "up"))
    return SigmoidMoeConfig(
        fields.size("hidden_size"),
        fields.size("moe_intermediate_size"),
        0,
        num_experts,
        Routing(top_k, is_normalised=True, scores="sigmoid", eps=ROUTER_EPS, scale=scale),
        has_bias=True,
        router_dtype=torch.float32,
        activation=Activation(capped_swiglu, is_gated=True, limit=gate_cap, up_limit=up_cap),
    )


def _published(decoder: Decoder, ends: BlockEnds, layers: Sequence[BlockLayer], names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors."""
    del names
    embedding = decoder.embedding
    assert embedding.head is not None
    for name, rows_ZE in (("embed", embedding.embed_ZE), ("unembed", embedding.head.weight_OI)):
        yield f"{PUBLISHED}{name}.weight", embedding.published(rows_ZE)
    yield f"{PUBLISHED}embed_norm.weight", whole(ends.first.norm_QE[0])
    yield f"{PUBLISHED}norm.weight", whole(ends.last.norm_QE[0])
    yield f"{PUBLISHED}attn_res.output_query", ends.last.query
    for index, layer in enumerate(layers):
        yield from layer.targets(f"{PUBLISHED}layers.{index}.")
        yield f"{PUBLISHED}attn_res.mlp_queries.{index}", layer.mlp_reader.query
        if index:
            yield f"{PUBLISHED}attn_res.attn_queries.{index - 1}", layer.mixer_reader.query
