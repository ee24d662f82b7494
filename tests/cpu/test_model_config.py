"""Configurations that no model can be built from: each is refused by the name of its field, before any allocation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline.architectures.supported import SUPPORTED
from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.model_config import ARCHITECTURES, NEAREST_BY_LAYERS, find_architecture, read_model_config
from strandline.models import registry
from strandline.models.layers.parts.site import Site
from strandline.models.model_options import published_dtype
from strandline.text.vocabulary import load_vocabulary
from tests.cpu.models.families import GLM5, ODD, config_of, model_config

NO_DEVICE = "there is none of this name"
"""An allocation on it raises another error than the one that is expected."""

WHOLE = "it must be a whole number from"


def write(directory: Path, name: str = "qwen3_5", **changes: Any) -> Path:
    """Write a family's ``config.json`` with other values."""
    config_of(name).save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def read_and_build(directory: Path) -> None:
    config = read_model_config(directory)
    registry.builder_for(config)(config, Site(torch.float32, NO_DEVICE))


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **values}}


INDEX = [f"indexer_{name}" for name in ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")]
"""Fields that a model with ordinary attention leaves out."""


def of_text(**values: Any) -> dict[str, Any]:
    return {"text_config": {**GLM5, **values}}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_5", {"vocab_size": 0}, f"vocab_size is 0; {WHOLE} 1 to 16,777,216"),
    ("qwen3_5", {"hidden_size": -32}, f"hidden_size is -32; {WHOLE} 1 to 1,048,576"),
    ("qwen3_5", {"intermediate_size": 10**12}, f"intermediate_size is 1000000000000; {WHOLE} 1 to 1,048,576"),
    ("qwen3_5", {"max_position_embeddings": 0}, f"max_position_embeddings is 0; {WHOLE} 1 to 2,147,483,647"),
    ("qwen3_5", {"num_attention_heads": 0}, f"num_attention_heads is 0; {WHOLE} 1 to 1,024"),
    ("qwen3_5", {"num_key_value_heads": 0}, f"num_key_value_heads is 0; {WHOLE} 1 to 1,024"),
    ("qwen3_5", {"num_key_value_heads": 3}, "num_key_value_heads is 3; it must be a divisor of num_attention_heads, 4"),
    ("qwen3_5", {"num_key_value_heads": 8}, "num_key_value_heads is 8; it must be a divisor of num_attention_heads, 4"),
    ("qwen3_5", {"head_dim": -16}, f"head_dim is -16; {WHOLE} 1 to 256"),
    ("qwen3_5", {"head_dim": 15, **rope(partial_rotary_factor=1.0)}, "head_dim is 15; it must be even"),
    ("qwen3_5", {"linear_num_value_heads": 3}, "is 3; it must be a multiple of linear_num_key_heads, 2"),
    ("qwen3_next", {"linear_num_value_heads": 3}, "is 3; it must be a multiple of linear_num_key_heads, 2"),
    ("qwen3_5", {"linear_key_head_dim": 257}, f"linear_key_head_dim is 257; {WHOLE} 1 to 256"),
    ("qwen3_5", {"linear_conv_kernel_dim": 0}, f"linear_conv_kernel_dim is 0; {WHOLE} 2 to 5"),
    ("qwen3_5", {"mamba_ssm_dtype": "float64"}, "mamba_ssm_dtype 'float64' is not supported; supported: float32, "),
    ("qwen3_5", {"mamba_ssm_dtype": 16}, "mamba_ssm_dtype 16 is not supported; supported: float32, bfloat16, float16"),
    ("qwen3_5", {"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06; it must be a number from 1e-12 to 1"),
    ("qwen3_5", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number from 1e-12 to 1"),
    ("qwen3_5", {"num_hidden_layers": 0, "layer_types": []}, f"num_hidden_layers is 0; {WHOLE} 1 to 1,024"),
    ("qwen3_5", {"layer_types": ["linear_attention", "sliding_attention"], "num_hidden_layers": 2},
     r"layer_types\[1\] 'sliding_attention' is not supported; supported: full_attention, linear_attention"),
    ("qwen3_5", rope(partial_rotary_factor=2.0), "rope_parameters.partial_rotary_factor is 2.0; it must be a number"),
    ("qwen3_5", rope(partial_rotary_factor=-0.5), "partial_rotary_factor is -0.5; it must be a number from 0 to 1"),
    ("qwen3_5", rope(partial_rotary_factor=0.2), "is 0.2; it must be such that an even number of a head's 16 channels"),
    ("qwen3_5", rope(rope_theta=0), "rope_parameters.rope_theta is 0; it must be a number from 1 to 1e"),
    ("qwen3_5", rope(rope_type="linear", factor="2"), "rope_parameters.factor is '2'; it must be a number from 0.001"),
    ("qwen3_5", rope(rope_type="linear", factor=float("nan")), "rope_parameters.factor is nan; it must be a number"),
    ("qwen3_5", rope(rope_type="linear"), "rope_parameters.factor is missing; it must be a number from 0.001"),
    ("qwen3_5", rope(rope_type="longrope"), "rope_parameters.rope_type 'longrope' is not supported; supported: def"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type 'dynamic' is not support"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": -1}}, "rope_scaling.beta_fast is -1; it"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 1}}, "rope_scaling.truncate is 1; it must"),
    ("llama", {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}}, "_embeddings is 0; it must"),
    ("qwen3_5", {"rope_parameters": "none"}, "rope_parameters is 'none'; it must be an object"),
    ("qwen3_5", {"rope_parameters": []}, r"rope_parameters is \[\]; it must be an object"),
    ("qwen3_5", {"architectures": "LlamaForCausalLM"}, "is 'LlamaForCausalLM'; it must be a list of names"),
    ("qwen3_5", {"architectures": [3]}, r"architectures is \[3\]; it must be a list of names"),
    ("qwen3_5", {"vocab_size": "97"}, f"vocab_size is '97'; {WHOLE} 1 to"),
    ("qwen3_5", {"num_hidden_layers": 3}, "num_hidden_layers is 3; it must be the number of layer_types, 4"),
    ("qwen3_5", {"layer_types": ["full_attention", 7]}, r"layer_types\[1\] 7 is not supported; supported: full_att"),
    ("qwen3_5", {"layer_types": "full_attention"}, "layer_types is 'full_attention'; it must be a list"),
    ("qwen3_5", {"text_config": 3}, "text_config is 3; it must be an object"),
    ("qwen3_5", {"model_type": "unheard_of"}, "model_type 'unheard_of' is not supported; supported: qwen3_5, "),
    ("qwen3_next", {"architectures": ["LlamaForCausalLM"]}, "model_type 'qwen3_next' is not supported; supported: lla"),
    ("qwen3_5_moe", {"num_experts_per_tok": 6}, f"num_experts_per_tok is 6; {WHOLE} 1 to 5"),
    ("qwen3_5_moe", {"num_experts_per_tok": 0}, f"num_experts_per_tok is 0; {WHOLE} 1 to 5"),
    ("qwen3_5_moe", {"num_experts": -1}, f"num_experts is -1; {WHOLE} 0 to "),
    ("qwen3_next", {"decoder_sparse_step": 0}, f"decoder_sparse_step is 0; {WHOLE} 1 to "),
    ("bamba", {"time_step_limit": [1.0, 0.5]}, "time_step_limit is .*; it must be the least and the largest time step"),
    ("bamba", {"time_step_limit": [-1.0, 0.5]}, r"time_step_limit\[0\] is -1.0; it must be a number from 0 to inf"),
    ("bamba", {"mamba_n_groups": 3}, "mamba_n_heads is 8; it must be a multiple of mamba_n_groups, 3"),
    ("bamba", {"mamba_d_state": 512}, f"mamba_d_state is 512; {WHOLE} 1 to 256"),
    ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers is .*; it must be a list of 5 numbers"),
    ("falcon_h1", {"mlp_multipliers": [1.0, 1e9]}, r"mlp_multipliers\[1\] is 1000000000.0; it must be a number from "),
    ("falcon_h1-odd", {"mamba_norm_before_gate": True}, "it must be false where mamba_rms_norm is true"),
    ("granite_hybrid", {"logits_scaling": 0}, "logits_scaling is 0; it must be a number from 0.0001 to 10000"),
    ("granite_hybrid", {"position_embedding_type": "alibi"}, "'alibi' is not supported; supported: rope, nope"),
    ("granite_hybrid", {"num_experts_per_tok": 6}, f"num_experts_per_tok is 6; {WHOLE} 1 to 5"),
    ("nemotron_h", {"n_group": 2}, "n_group is 2; it must be such that groups of all 5 experts are"),
    ("nemotron_h-odd", {"topk_group": 5}, f"topk_group is 5; {WHOLE} 1 to 4"),
    ("nemotron_h-odd", {"num_experts_per_tok": 7}, f"num_experts_per_tok is 7; {WHOLE} 1 to 6"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported; supported: relu2"),
    ("zamba2", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported; supported: gelu"),
    ("zamba2", {"num_mem_blocks": 0}, f"num_mem_blocks is 0; {WHOLE} 1 to "),
    ("llama", {"mlp_bias": True}, "mlp_bias is True; it must be false"),
    ("llama", {"max_position_embeddings": 0}, f"max_position_embeddings is 0; {WHOLE} 1 to 2,147,483,647"),
    ("falcon_mamba", {"mixer_rms_eps": 0.0}, r"mixer_rms_eps is 0.0; it must be a number from 1e-12 to 1"),
    ("jamba", {"expert_layer_period": 0, "expert_layer_offset": -1}, f"expert_layer_period is 0; {WHOLE} 1 to 1,024"),
    ("jamba", {"attn_layer_offset": -1}, f"attn_layer_offset is -1; {WHOLE} 0 to 2"),
    ("jamba", {"num_experts_per_tok": 6}, f"num_experts_per_tok is 6; {WHOLE} 1 to 5"),
    ("jamba", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    ("mamba", {"conv_kernel": 9}, f"conv_kernel is 9; {WHOLE} 2 to 5"),
    ("mamba", {"state_size": 0}, f"state_size is 0; {WHOLE} 1 to 256"),
    ("minimax", {"sliding_window": 64}, "sliding_window is 64; it must be null"),
    ("minimax", {"rotary_dim": 17}, f"rotary_dim is 17; {WHOLE} 2 to 16"),
    ("glm5_next", of_text(hc_mult=9), f"hc_mult is 9; {WHOLE} 1 to 8"),
    ("glm5_next", of_text(swiglu_limit=0.0), "swiglu_limit is 0.0; it must be a number from 0.001 to 1e"),
    ("glm5_next", of_text(linear_lower_bound=1.0), "linear_lower_bound is 1.0; it must be a number from -100 to 0"),
    ("glm5_next", of_text(attention_bias=True), "attention_bias is True; it must be false"),
    ("glm5_next", of_text(index_kpool_always_select_tail=False), "_select_tail is False; it must be true"),
    ("glm5_next", of_text(indexer_types=["full", "full", "full"]), r"indexer_types is \[.*; it must be a list of 4"),
    ("glm5_next", of_text(indexer_types=["full", "shared", "full", "full"]),
     "such that layer 1 shares the index of an attention layer before it"),
    ("kimi_linear", {"q_lora_rank": 8}, "q_lora_rank is 8; it must be null"),
    ("kimi_linear", {"num_key_value_heads": 2}, "is 2; it must be the number of attention heads, 4"),
    ("kimi_linear", {"num_expert_group": 2}, "num_expert_group is 2; it must be such that groups of all 5 experts are"),
    ("inkling", {"swa_num_key_value_heads": 3},
     "swa_num_key_value_heads is 3; it must be a divisor of swa_num_attention_heads, 4"),
    ("inkling", {"swa_head_dim": 7}, "swa_head_dim is 7; it must be even"),
    ("inkling", {"conv_kernel_size": 6}, f"conv_kernel_size is 6; {WHOLE} 2 to 5"),
    ("inkling", {"shared_expert_sink": False}, "shared_expert_sink is False; it must be true"),
    ("inkling", {"n_shared_experts": 0}, f"n_shared_experts is 0; {WHOLE} 1 to 16,379"),
    ("inkling", {"unpadded_vocab_size": 98}, f"unpadded_vocab_size is 98; {WHOLE} 1 to 97"),
    ("inkling", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    ("inkling2", {"qk_l2_clip_threshold": 0}, "qk_l2_clip_threshold is 0; it must be a number from 1e-06 to 1e"),
    ("inkling2", {"mlp_up_softcap": 0.0}, "mlp_up_softcap is 0.0; it must be a number from 0.001 to 1e"),
    ("inkling2", {"n_layers_per_attn_res_block": 0}, f"n_layers_per_attn_res_block is 0; {WHOLE} 1 to"),
    ("inkling2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: sigmoid"),
    ("recurrent_gemma", {"lru_width": 30}, "lru_width is 30; it must be a multiple of num_attention_heads, 4"),
    ("recurrent_gemma", {"attention_window_size": 0}, f"attention_window_size is 0; {WHOLE} 1 to 1,048,576"),
    ("lfm2", {"conv_L_cache": 1}, f"conv_L_cache is 1; {WHOLE} 2 to 7"),
    ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
     r"layer_types\[3\] 'sliding_attention' is not supported; supported: full_attention, conv"),
    ("lfm2_moe", {"num_dense_layers": 5}, f"num_dense_layers is 5; {WHOLE} 0 to 4"),
    ("lfm2_moe", {"num_experts_per_tok": 6}, f"num_experts_per_tok is 6; {WHOLE} 1 to 5"),
    ("qwen3", {"vocab_size": -1}, f"vocab_size is -1; {WHOLE} 1 to 16,777,216"),
    ("qwen3", {"num_attention_heads": 3}, "num_key_value_heads is 2; it must be a divisor of num_attention_heads, 3"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
     r"layer_types\[1\] 'sliding_attention' is not supported; supported: full_attention"),
    ("qwen3", rope(partial_rotary_factor=4.0), "rope_parameters.partial_rotary_factor is 4.0; it must be a number"),
    ("qwen4_exp", dict.fromkeys(INDEX), "indexer_kv_heads is missing; it must be a whole number"),
    ("qwen4_exp", {"indexer_head_dim": 512}, f"indexer_head_dim is 512; {WHOLE} 4 to 256"),
    ("qwen4_exp", {"hc_count": 9}, f"hc_count is 9; {WHOLE} 2 to 8"),
    ("qwen4_exp", {"ngram_size": 5}, f"ngram_size is 5; {WHOLE} 2 to 4"),
    ("qwen4_exp", {"ple_conv_kernel_size": 5}, f"ple_conv_kernel_size is 5; {WHOLE} 2 to 4"),
    ("qwen4_exp", {"eos_token_id": 97}, f"eos_token_id is 97; {WHOLE} 0 to 96"),
    ("qwen4_exp", {"hidden_act": "gelu", "output_gate_type": "silu"}, "'gelu' is not supported; supported: silu"),
    ("zaya", {"cca_time0": 5}, f"cca_time0 is 5; {WHOLE} 1 to 4"),
    ("zaya", {"cca_time0": 4, "cca_time1": 3}, "cca_time1 is 3; it must be such that both convolutions together have"),
    ("zaya", {"attention_bias": True}, "attention_bias is True; it must be false"),
    ("zaya", {"lm_head_bias": True}, "lm_head_bias is True; it must be false"),
    ("zaya", {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 8},
     r"layer_types\[1\] 'hybrid_sliding' is not supported; supported: hybrid"),
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0; it must be a number from 0.001"),
    ("gpt_oss", {"swiglu_alpha": "1.7"}, "swiglu_alpha is '1.7'; it must be a number from 0 to 100"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window is missing; it must be a whole number"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    ("gpt_oss", {"num_experts_per_tok": 6}, f"num_experts_per_tok is 6; {WHOLE} 1 to 5"),
    ("lfm3", {"conv_L_cache": 8}, f"conv_L_cache is 8; {WHOLE} 2 to 7"),
    ("lfm3", {"use_attention_gate": 1}, "use_attention_gate is 1; it must be true or false"),
    ("lfm3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
     "rope_parameters is .*; it must be one with 'sliding_attention'"),
    ("nemotron_puzzle", {"block_configs": [{"block_type": "mamba", "mamba_head_dim": 3}]},
     r"block_configs\[0\].mamba_head_dim is 3; it must be left out: layers of one kind have the same"),
    ("nemotron_puzzle",
     {"block_configs": [{"block_type": "moe", "num_experts_per_tok": 9, "moe_intermediate_size": 8}]},
     rf"block_configs\[0\].num_experts_per_tok is 9; {WHOLE} 1 to 5"),
    ("nemotron_puzzle", {"block_configs": None}, "block_configs is missing; it must be a list of objects"),
    ("nemotron_puzzle", {"block_configs": [{}]}, r"block_configs\[0\].block_type"),
    ("minicpmv4_6", {"text_config": {"model_type": "qwen3_5_moe_text"}},
     "text_config.model_type 'qwen3_5_moe_text' is not supported; supported: qwen3_5_text"),
    ("nemotron_omni", {"llm_config": [3]}, r"llm_config is \[3\]; it must be an object"),
    ("lara_mini", {"sliding_window": 0}, f"sliding_window is 0; {WHOLE} 1 to 1,048,576"),
    ("lara_mini", {"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
    ("bailing_hybrid", {"kda_lower_bound": 1.0}, "kda_lower_bound is 1.0; it must be a number from -100 to 0"),
    ("bailing_hybrid", {"qk_rope_head_dim": 5}, "such that an even number of a head's"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; it must be null"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; it must be false"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported; supported: gelu_"),
    ("gemma3", {"rope_parameters": {"full_attention": 3}}, "rope_parameters is .*; it must be an object of full_att"),
    ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}},
     "rope_parameters.sliding_attention.rope_type 'dynamic' is not supported; supported: default"),
    ("qwen3_next", {"mlp_only_layers": [-1]}, rf"mlp_only_layers\[0\] is -1; {WHOLE} 0 to "),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_wrong_value_is_refused_by_name_before_allocation(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: .*{message}"):
        read_and_build(write(tmp_path, name, **changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, "\ud800"])
def test_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError, match=r"config\.json (cannot be read as JSON|must be a JSON object)"):
        read_model_config(tmp_path)


def test_number_of_layers_is_checked_before_kinds_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers is 1000000000000; it must be a whole number from 1"):
        read_model_config(write(tmp_path, num_hidden_layers=10**12, layer_types=None))


def test_missing_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="intermediate_size is missing; it must be a whole number"):
        read_and_build(write(tmp_path, "qwen3_5_moe", num_experts=0))


def test_odd_but_possible_sizes_are_accepted() -> None:
    config = model_config(config_of("qwen3_5-odd-tied"))
    model: Any = registry.builder_for(config)(config, Site(torch.float32, "meta"))
    assert (config.text.size("num_attention_heads"), len(model.spec.layers)) == (ODD["num_attention_heads"], 4)


def test_rotated_channels_are_read_where_published_models_name_them(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, "minimax", rotary_dim=6))
    model: Any = registry.builder_for(config)(config, Site(torch.float32, "meta"))
    assert len(model.decoder.inv_freq_F) == 3


def test_dtype_of_unsupported_weights_is_refused(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, dtype="float64"))
    with pytest.raises(ConfigError, match="dtype 'float64' is not supported; supported: float32, bfloat16, float16"):
        published_dtype(config)


def test_every_architecture_has_a_builder() -> None:
    assert set(registry.ARCHITECTURES) == set(ARCHITECTURES)


def vocabulary_of(directory: Path, generation: Any = None) -> frozenset[int]:
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_vocabulary(EngineConfig(model=str(directory), skip_tokenizer_init=True)).eos_ids


@pytest.mark.parametrize("eos", [5000, -1, [3, 97], 97])
def test_end_token_beyond_the_vocabulary_is_refused(eos: Any, tmp_path: Path) -> None:
    wrong = eos if isinstance(eos, int) else eos[1]
    message = rf"eos_token_id\S* is {wrong}; it must be a whole number from 0 to 96"
    with pytest.raises(ConfigError, match=f"^config.json: {message}"):
        vocabulary_of(write(tmp_path / "config", eos_token_id=eos))
    with pytest.raises(ConfigError, match=f"^generation_config.json: {message}"):
        vocabulary_of(write(tmp_path / "generation"), {"eos_token_id": eos})


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ([], "must be a JSON object"),
        ({"eos_token_id": "3"}, "eos_token_id is '3'; it must be a whole number from 0 to 96"),
        ({"eos_token_id": [3, None]}, r"eos_token_id\[1\] is missing; it must be a whole number"),
        ({"eos_token_id": True}, "eos_token_id is True; it must be a whole number"),
    ],
)
def test_wrong_generation_config_is_refused(generation: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        vocabulary_of(write(tmp_path), generation)


def test_generation_config_replaces_end_tokens(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=5)
    assert vocabulary_of(tmp_path) == {5}
    assert vocabulary_of(tmp_path, {"eos_token_id": [0, 96]}) == {0, 96}
    assert vocabulary_of(tmp_path, {"eos_token_id": None}) == frozenset()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("LlamaForSequenceClassification", "LlamaForCausalLM"),
        ("BailingMoeV2_5ForCausalLM", "KimiLinearForCausalLM"),
        ("DeepseekV3ForCausalLM", "KimiLinearForCausalLM"),
        ("MistralForCausalLM", "LlamaForCausalLM"),
        ("Inkling2LoopForConditionalGeneration", "Inkling2ForCausalLM"),
        ("Qwen3_6MoeForCausalLM", "Qwen3_5MoeForCausalLM"),
        ("GPT2LMHeadModel", r"\w+"),
    ],
)
def test_unsupported_architecture_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"names {name}; supported: .*; the nearest is {nearest}$") as error:
        find_architecture([name])
    assert ", ".join(ARCHITECTURES) in str(error.value)


def test_nearest_by_layers_are_supported() -> None:
    assert set(NEAREST_BY_LAYERS.values()) <= set(ARCHITECTURES)
    assert not any(name.partition("For")[0] in NEAREST_BY_LAYERS for name in ARCHITECTURES)


def test_missing_architecture_lists_the_supported_ones() -> None:
    for names in (None, []):
        with pytest.raises(ConfigError, match=f"names no architecture; supported: {', '.join(ARCHITECTURES)}$"):
            find_architecture(names)


@pytest.mark.parametrize("names", [None, []])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_type_names_the_architecture_where_nothing_else_does(architecture: str, names: list[str] | None) -> None:
    for model_type in SUPPORTED[architecture].model_types:
        assert SUPPORTED[find_architecture(names, model_type)] is SUPPORTED[architecture]
        with pytest.raises(ConfigError, match="names GPT2LMHeadModel; supported: "):
            find_architecture(["GPT2LMHeadModel"], model_type)


@pytest.mark.parametrize("model_type", [None, "", "gpt2", 3, ["llama"]])
def test_model_type_of_no_architecture_is_refused(model_type: object) -> None:
    with pytest.raises(ConfigError, match="names no architecture; supported: "):
        find_architecture(None, model_type)


def test_architecture_is_refused_before_a_missing_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, architectures=["GPT2LMHeadModel"])
    with pytest.raises(ConfigError, match="names GPT2LMHeadModel; supported: "):
        load_vocabulary(EngineConfig(model=str(tmp_path)))
