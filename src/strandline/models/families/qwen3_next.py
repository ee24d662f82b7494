"""Qwen3-Next: three Gated DeltaNet layers, then one of gated attention, and so on; mostly mixtures of experts.

Input projections of a Gated DeltaNet layer are published as two tensors whose rows are grouped by key head; they are
fused into one, in the layer's order.
"""

from strandline.config_fields import Fields
from strandline.model_config import ModelConfig
from strandline.models.families import qwen3_hybrid
from strandline.models.families.causal_lm import CausalLM
from strandline.models.families.qwen3_hybrid import HybridConfig, MlpConfig
from strandline.models.layers.feed_forward.mlp import GatedMlpConfig
from strandline.models.layers.feed_forward.moe import SparseMoeConfig
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, interleaved
from strandline.models.layers.recurrences.gated_delta import GatedDeltaNet


def build_qwen3_next(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters.

    Raises:
        ConfigError: a setting is not supported.
    """
    hybrid, fields = HybridConfig.read(config.text), config.text
    mlps = read_mlps(fields, len(hybrid.layer_types))
    return qwen3_hybrid.build(hybrid, mlps, in_proj_targets, site)


def read_mlps(fields: Fields, num_layers: int, *, is_shared: bool = True) -> list[MlpConfig]:
    """Read the feed-forward part of each layer: experts in every ``decoder_sparse_step``-th, but for exceptions.

    Args:
        is_shared: whether the family has a shared expert.
    """
    is_sparse = fields.size("num_experts", at_least=0) > 0
    step = fields.size("decoder_sparse_step")
    dense = fields.list_of("mlp_only_layers", lambda entries, name: entries.size(name, at_least=0))
    is_normalised = fields.flag("norm_topk_prob")
    return [
        SparseMoeConfig.read(fields, is_normalised=is_normalised, is_shared=is_shared)
        if is_sparse and (index + 1) % step == 0 and index not in dense
        else GatedMlpConfig.read(fields)
        for index in range(num_layers)
    ]


def in_proj_targets(mixer: GatedDeltaNet, prefix: str) -> NamedTargets:
    """Yield the two input projections: per key head, the rows of q, k, v, z, and those of b, a."""
    qkv, z, b, a, _ = mixer.in_proj.weights
    q, k, v = qkv.split(mixer.conv_sizes)
    by_key_head = (mixer.num_key_heads, -1)
    for name, parts in {"qkvz": (q, k, v, z), "ba": (b, a)}.items():
        by_group = (part.unflatten(0, by_key_head) for part in parts)
        yield f"{prefix}in_proj_{name}.weight", interleaved(*by_group, shard=mixer.shard)
