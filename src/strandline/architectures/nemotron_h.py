"""Configurations of Nemotron-H and Nemotron 3."""

from typing import Any, Final

from strandline.architectures.architecture import Architecture, Values, spelled_by
from strandline.config_fields import Fields

LETTERS: Final = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
TOY_LAYERS: Final = ("linear_attention", "moe", "full_attention", "mlp")
DRAFT_PARTS: Final = ("full_attention", "moe")


def _unpack(fields: Fields) -> Values:
    """Read the patterns that older files have instead of lists; the number of layers is that of their kinds."""
    values: dict[str, Any] = {}
    layers = fields.value("layer_types")
    if layers is None and fields.value("hybrid_override_pattern") is not None:
        layers = values["layer_types"] = spelled_by(fields, "hybrid_override_pattern", LETTERS)
    if isinstance(layers, list):
        values["num_hidden_layers"] = len(layers)
    if fields.value("mtp_layers_block_type") is None and fields.value("mtp_hybrid_override_pattern") is not None:
        values["mtp_layers_block_type"] = spelled_by(fields, "mtp_hybrid_override_pattern", LETTERS)
    return values


def _complete(fields: Fields) -> Values:
    return {"num_hidden_layers": len(TOY_LAYERS)}


NEMOTRON_H: Final = Architecture(
    model_types=("nemotron_h",),
    layer_types=lambda fields: TOY_LAYERS,
    defaults={
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "mtp_layers_block_type": DRAFT_PARTS,
    },
    spellings={
        "layers_block_type": "layer_types",
        "num_local_experts": "n_routed_experts",
        "attention_head_dim": "head_dim",
        "norm_eps": "layer_norm_epsilon",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_limit": "time_step_limit",
    },
    unpack=_unpack,
    complete=_complete,
)
