"""Configurations of Nemotron-H and Nemotron 3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from strandline.architectures.architecture import Architecture, Values, spelled_by
from strandline.config_fields import Fields

LETTERS: Final = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
TOY_LAYERS: Final = ("linear_attention", "moe", "full_attention", "mlp")
DRAFT_PARTS: Final = ("full_attention", "moe")
BLOCKS: Final = ("mamba", "attention", "moe", "mlp")
DIFFERING: Final = frozenset({"block_type", "moe_intermediate_size", "num_experts_per_tok"})
"""What mixtures of experts of one model may differ in."""


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


def _unpack_blocks(fields: Fields) -> Values:
    """Read the kinds of layers from a list with what they differ in."""
    values: dict[str, Any] = {}
    for name, kinds in {"block_configs": "layer_types", "mtp_block_configs": "mtp_layers_block_type"}.items():
        if name == "block_configs" or fields.value(name) is not None:
            values[kinds] = [block["block_type"] for block in read_blocks(fields, name)]
    return {**values, "num_hidden_layers": len(values["layer_types"])}


def read_blocks(fields: Fields, name: str) -> list[dict[str, Any]]:
    """Return what layers differ in, with ``block_type``, their kind; null means that a layer does not differ.

    Raises:
        ConfigError: it is no list of objects, or something differs that may not.
    """
    blocks: Any = fields.value(name)
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        fields.reject(name, "a list of objects")
    given = [{key: value for key, value in block.items() if value is not None} for block in blocks]
    for index, block in enumerate(given):
        entry = Fields(block, f"config.json: {name}[{index}].")
        entry.choice("block_type", BLOCKS)
        for key in block.keys() - (DIFFERING if block["block_type"] == "moe" else {"block_type"}):
            entry.reject(key, "left out: layers of one kind have the same")
    return given


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

NEMOTRON_PUZZLE: Final = replace(
    NEMOTRON_H,
    model_types=("nemotron_h_puzzle",),
    defaults={name: value for name, value in NEMOTRON_H.defaults.items() if name not in DIFFERING},
    unpack=_unpack_blocks,
)

NEMOTRON_OMNI: Final = replace(
    NEMOTRON_H,
    model_types=("NemotronH_Nano_Omni_Reasoning_V3", "nemotron_h_omni"),
    text_types=("nemotron_h",),
)
