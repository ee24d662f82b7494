"""What the configuration of a drafter may say, and what is said of anything else."""

import json
from pathlib import Path
from typing import Any

import pytest

from strandline.drafter_config import BlockDrafterConfig, MarkovConfig, SelectorConfig, read_drafter_config
from strandline.errors import ConfigError
from strandline.model_config import read_model_config

PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "sliding_window": 2048,
    "vocab_size": 248320,
}


SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "Qwen/Qwen3.5-27B"}},
    "aux_hidden_state_layer_ids": [2, 17, 32],
    "mask_token_id": 248070,
    "draft_vocab_size": 32000,
    "sliding_window_non_causal": False,
    "transformer_layer_config": {
        name: value for name, value in PUBLISHED.items() if name not in ("architectures", "block_size", "dflash_config")
    },
}


def write(directory: Path, **changes: Any) -> Path:
    """Write the configuration; a change to None removes a field."""
    values = {name: value for name, value in {**PUBLISHED, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def read_block_config(directory: Path) -> BlockDrafterConfig:
    config = read_drafter_config(directory, "dflash")
    assert isinstance(config, BlockDrafterConfig)
    return config


def block(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**PUBLISHED["dflash_config"], **changes}}


def test_published_configuration_is_read(tmp_path: Path) -> None:
    config = read_block_config(write(tmp_path))
    assert (config.mask_token_id, config.target_layers) == (248070, (1, 16, 31, 46, 61))
    assert (config.most_drafts, config.num_target_layers, config.dtype) == (15, 64, "bfloat16")
    assert config.windows == (2048, 2048, 2048, 2048, None)
    assert config.is_causal == (True, True, True, True, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (block(causal=False), [False] * 5),
        ({**block(causal=False), "is_causal": True}, [True] * 5),
        ({"layer_types": ["full_attention"] * 5}, [False] * 5),
    ],
)
def test_causality_may_be_given_for_all_layers(tmp_path: Path, changes: dict[str, Any], expected: list[bool]) -> None:
    assert [*read_block_config(write(tmp_path, **changes)).is_causal] == expected


@pytest.mark.parametrize("non_causal", [False, True, None])
def test_files_of_the_library_speculators_are_read(tmp_path: Path, non_causal: bool | None) -> None:
    changes: dict[str, Any] = dict.fromkeys(PUBLISHED) | {"block_size": 8, **SPECULATORS}
    config = read_block_config(write(tmp_path, **changes | {"sliding_window_non_causal": non_causal}))
    assert (config.mask_token_id, config.target_layers, config.draft_vocab_size) == (248070, (1, 16, 31), 32000)
    assert (config.most_drafts, config.num_target_layers) == (7, 64)
    assert config.is_causal == ((True,) * 4 + (False,) if non_causal is False else (False,) * 5)


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DFlash2DraftModel"]}, "selector_rank is missing"),
    ({"architectures": ["Qwen3DSparkModel"]}, "is of a drafter for method dspark, not dflash"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM.*not supported; supported: DFlashDraftModel"),
    ({"architectures": None}, "architectures None is not supported"),
    ({"architectures": 3}, "architectures 3 is not supported"),
    ({"speculators_model_type": "dflash"}, "transformer_layer_config is missing; it must be an object"),
    ({"speculators_model_type": "dflash2"}, "speculators_model_type 'dflash2' is not supported; supported: dflash, ds"),
    ({"speculators_model_type": "peagle"}, "'peagle' is not supported: it drafts all tokens in one pass"),
    ({"speculators_model_type": "mlp"}, "'mlp' is not supported; supported: dflash, dspark, eagle3"),
    ({"speculators_model_type": 3}, "speculators_model_type 3 is not supported"),
    ({**SPECULATORS, "sample_from_anchor": 1}, "sample_from_anchor is 1; it must be true or false"),
    ({**SPECULATORS, "aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
    ({**SPECULATORS, "aux_hidden_state_layer_ids": [0]}, r"aux_hidden_state_layer_ids\[0\] is 0"),
    ({**SPECULATORS, "mask_token_id": None}, "mask_token_id is missing"),
    ({"dflash_config": None}, "dflash_config is missing; it must be an object"),
    ({"dflash_config": []}, "dflash_config is \\[\\]; it must be an object"),
    (block(mask_token_id=-1), "dflash_config.mask_token_id is -1"),
    (block(mask_token_id=None), "dflash_config.mask_token_id is missing"),
    (block(target_layer_ids=[]), "dflash_config.target_layer_ids is \\[\\]"),
    (block(target_layer_ids=[1, 1]), "target_layer_ids is \\[1, 1\\]; it must be one layer or more, each of them once"),
    (block(target_layer_ids=[1, "a"]), "target_layer_ids\\[1\\] is 'a'"),
    (block(attention_sink_bias=True), "dflash_config.attention_sink_bias is True; it must be false"),
    (block(attention_value_scale=0.5), "dflash_config.attention_value_scale is 0.5; it must be 1"),
    (block(use_swa=True), "dflash_config.use_swa is True"),
    (block(markov_rank=256), "dflash_config.markov_rank is 256; it must be absent: known fields are"),
    ({"is_causal": 1}, "is_causal is 1; it must be true or false"),
    ({"is_neox_style": False}, "is_neox_style is False; it must be true"),
    ({"block_size": 1}, "block_size is 1; it must be a whole number from 2"),
    ({"sliding_window": None}, "sliding_window is missing"),
    ({"layer_types": ["linear_attention"] * 5}, "layer_types\\[0\\] 'linear_attention' is not supported"),
    ({"num_hidden_layers": 4}, "num_hidden_layers is 4; it must be the number of layer_types, 5"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*must be null"),
]


DFLASH2: dict[str, Any] = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
DSPARK: dict[str, Any] = {"architectures": ["DSparkDraftModel"], "markov_rank": 256, "block_size": 7}


def dflash2(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["DFlash2DraftModel"], **block(**DFLASH2 | changes)}


def test_settings_of_dflash2_are_read(tmp_path: Path) -> None:
    changes = dflash2(output_multiplier=0.5, final_logit_softcapping=30.0, input_embedding_scale=2)
    config = read_block_config(write(tmp_path, **changes))
    assert (config.convolution, config.embedding_scale, config.first_draft_row) == ((2, 16), 2.0, 1)
    assert config.chain == SelectorConfig(256, 16, 0.5, 30.0)
    assert config.most_drafts == 15


@pytest.mark.parametrize(
    ("changes", "first_row", "chain"),
    [
        ({}, 0, MarkovConfig(256)),
        ({"sample_from_anchor": False}, 1, MarkovConfig(256)),
        ({"dflash_config": None, **PUBLISHED["dflash_config"]}, 0, MarkovConfig(256)),
        ({"markov_rank": None, **block(markov_rank=8, projector_type="dspark")}, 0, MarkovConfig(8)),
        ({"markov_rank": 0}, 0, None),
    ],
    ids=str,
)
def test_settings_of_dspark_are_read(
    tmp_path: Path, changes: dict[str, Any], first_row: int, chain: MarkovConfig | None
) -> None:
    config = read_drafter_config(write(tmp_path, **{**DSPARK, **changes}), "dspark")
    assert isinstance(config, BlockDrafterConfig)
    assert (config.first_draft_row, config.most_drafts) == (first_row, 7 - first_row)
    assert (config.chain, config.mask_token_id) == (chain, 248070)


FAULTS_OF_CHAINS: list[tuple[dict[str, Any], str]] = [
    (dflash2(conv_group_size=7), "conv_group_size is 7; it must be a divisor of hidden_size, 5120"),
    (dflash2(conv_kernel_size=0), "conv_kernel_size is 0"),
    (dflash2(selector_top_k=2000), "selector_top_k is 2000; it must be a whole number from 1 to 1,024"),
    (dflash2(final_logit_softcapping=-1), "final_logit_softcapping is -1"),
    (dflash2(markov_rank=8), "dflash_config.markov_rank is 8; it must be absent"),
    ({**DSPARK, "markov_rank": None}, "markov_rank is missing"),
    ({**DSPARK, "markov_head_type": "rnn"}, "markov_head_type 'rnn' is not supported; supported: vanilla"),
    ({**DSPARK, "rope_is_neox_style": False}, "rope_is_neox_style is False; it must be true"),
    ({**DSPARK, "attention_sink_bias": True}, "attention_sink_bias is True; it must be false"),
    ({**DSPARK, **block(selector_rank=4)}, "selector_rank is 4; it must be absent"),
]


@pytest.mark.parametrize(("changes", "message"), FAULTS_OF_CHAINS, ids=str)
def test_faults_of_dependent_drafts_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    method = "dspark" if "DSpark" in changes["architectures"][0] else "dflash"
    with pytest.raises(ConfigError, match=message):
        read_drafter_config(write(tmp_path, **changes), method)


@pytest.mark.parametrize(("changes", "message"), FAULTS, ids=str)
def test_faults_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read_block_config(write(tmp_path, **changes))
    assert str(tmp_path) in str(raised.value)


def test_directory_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json: is it the directory of a drafter"):
        read_block_config(tmp_path)


def test_own_embedding_of_the_mask_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(ConfigError, match=r"mask_embedding\.pt is not supported"):
        read_block_config(write(tmp_path))


def test_configuration_of_benchmarks_goes_with_its_model() -> None:
    configs = Path(__file__).parents[2] / "benchmarks" / "configs"
    config = read_block_config(configs / "qwen3.5-35b-a3b-dflash")
    target = read_model_config(configs / "qwen3.5-35b-a3b-fp8").text
    assert config.text.size("hidden_size") == target.size("hidden_size")
    assert config.num_target_layers == target.size("num_hidden_layers")
