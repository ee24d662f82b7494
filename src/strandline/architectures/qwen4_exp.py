"""Configurations of Qwen4-Exp."""

from typing import Final

from strandline.architectures.architecture import Architecture, Values, every
from strandline.architectures.qwen3_hybrid import DEFAULTS, EXPERTS
from strandline.architectures.qwen_vision import QWEN_VISION
from strandline.config_fields import Fields


def _complete(fields: Fields) -> Values:
    return {"ple_embed_dim": fields.value("hidden_size"), "output_gate_type": fields.value("hidden_act")}


QWEN4_EXP: Final = Architecture(
    model_types=("qwen4_exp", "qwen4_exp_text"),
    layer_types=every(4, "indexed_attention", "linear_attention", "full_attention_interval"),
    layer_kinds={"full_attention": "indexed_attention"},
    defaults={
        **DEFAULTS,
        **EXPERTS,
        "norm_topk_prob": True,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_layer_ids": (),
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "seed": 1234,
        "split_ngram_parts": 512,
    },
    vision=QWEN_VISION,
    complete=_complete,
)
