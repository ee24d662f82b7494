"""Qwen3.5, dense and mixture of experts: three Gated DeltaNet layers, then one of gated attention, and so on.

Multimodal models also have a vision tower (``vision/tower.py``), whose tensors are skipped where only text is served.
Input projections of a Gated DeltaNet layer are published separately.
"""

from strandline.config_fields import Fields
from strandline.model_config import ModelConfig
from strandline.models.families import qwen3_hybrid
from strandline.models.families.causal_lm import CausalLM
from strandline.models.families.qwen3_hybrid import HybridConfig, MlpConfig
from strandline.models.layers.feed_forward.mlp import GatedMlpConfig
from strandline.models.layers.feed_forward.moe import SparseMoeConfig
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, sharded, stacked_rows
from strandline.models.layers.recurrences.gated_delta import GatedDeltaNet


def build_qwen3_5(config: ModelConfig, site: Site) -> CausalLM:
    """Build the model of a configuration, with unfilled parameters: experts in every layer if it counts any.

    Raises:
        ConfigError: a setting is not supported.
    """
    hybrid = HybridConfig.read(config.text)
    mlps = [read_mlp(config.text)] * len(hybrid.layer_types)
    return qwen3_hybrid.build(hybrid, mlps, in_proj_targets, site, vision=config.vision)


def read_mlp(fields: Fields) -> MlpConfig:
    """Read the feed-forward part of every layer."""
    if fields.size("num_experts", at_least=0, default=0):
        return SparseMoeConfig.read(fields, is_normalised=True)
    return GatedMlpConfig.read(fields)


def in_proj_targets(mixer: GatedDeltaNet, prefix: str) -> NamedTargets:
    """Yield the four input projections."""
    qkv, z, b, a, _ = mixer.in_proj.weights
    yield f"{prefix}in_proj_qkv.weight", stacked_rows(qkv, mixer.conv_sizes, [mixer.shard] * 3)
    yield f"{prefix}in_proj_z.weight", sharded(z, mixer.shard)
    yield f"{prefix}in_proj_b.weight", sharded(b, mixer.shard)
    yield f"{prefix}in_proj_a.weight", sharded(a, mixer.shard)
