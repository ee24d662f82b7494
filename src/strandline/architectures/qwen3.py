"""Configurations of Qwen3, dense and with experts."""

from collections.abc import Sequence
from typing import Final

from strandline.architectures.architecture import Architecture, all_layers, num_layers
from strandline.config_fields import MAX_SIZE, Fields

DEFAULTS: Final = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
}


def _layer_types(fields: Fields) -> Sequence[str]:
    count = num_layers(fields)
    if not fields.flag("use_sliding_window") or fields.value("sliding_window") is None:
        return ["full_attention"] * count
    num_full = fields.size("max_window_layers", at_least=0, at_most=MAX_SIZE)
    return ["sliding_attention" if index >= num_full else "full_attention" for index in range(count)]


QWEN3: Final = Architecture(
    model_types=("qwen3",),
    layer_types=_layer_types,
    defaults={**DEFAULTS, "head_dim": 128, "num_key_value_heads": 32, "max_window_layers": 28},
)

QWEN3_MOE: Final = Architecture(
    model_types=("qwen3_moe",),
    layer_types=all_layers("full_attention"),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "norm_topk_prob": False,
    },
    spellings={"num_local_experts": "num_experts"},
)
