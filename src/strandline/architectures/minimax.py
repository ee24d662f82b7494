"""Configurations of MiniMax-Text-01."""

from collections.abc import Sequence
from typing import Any, Final

from strandline.architectures.architecture import Architecture, Values, num_layers
from strandline.config_fields import Fields

ATTENTION_TYPES: Final = ("linear_attention", "full_attention")
"""What the numbers of ``attn_type_list`` mean."""

FIELDS_OF_PARTS: Final = {"linear_attention": "linear_attn", "full_attention": "full_attn", "mlp": "mlp"}


def _layer_types(fields: Fields) -> Sequence[str]:
    if fields.value("attn_type_list") is None:
        return ["linear_attention" if index % 2 else "full_attention" for index in range(num_layers(fields))]
    numbers = fields.list_of("attn_type_list", lambda entries, name: entries.size(name, at_least=0, at_most=1))
    return [ATTENTION_TYPES[number] for number in numbers]


def _unpack(fields: Fields) -> Values:
    """Refuse the other order of norms, which one field of the first files chooses."""
    if not fields.flag("postnorm", default=True):
        fields.reject("postnorm", "true")
    return {}


def _spellings() -> dict[str, Any]:
    names = ("alpha", "beta")
    return {f"layernorm_{old}_{x}": f"{new}_{x}_factor" for old, new in FIELDS_OF_PARTS.items() for x in names}


MINIMAX: Final = Architecture(
    model_types=("minimax",),
    layer_types=_layer_types,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "block_size": 256,
        **{f"{part}_{x}_factor": 1 for part in FIELDS_OF_PARTS.values() for x in ("alpha", "beta")},
    },
    spellings={"num_experts": "num_local_experts", **_spellings()},
    unpack=_unpack,
)
