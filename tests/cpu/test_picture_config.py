"""What model directories say of pictures, in every published spelling."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5Config, Qwen3_5MoeConfig, Qwen4ExpConfig

from strandline.errors import ConfigError
from strandline.model_config import parse_model_config
from strandline.picture_config import PictureConfig, read_picture_config

PREPROCESSOR: dict[str, Any] = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
EXPECTED = PictureConfig(16, 2, 65536, 16777216, (0.5,) * 3, (0.5,) * 3, 248056, 248053, 248054)
TEXT: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
VISION: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64}
SIZES = (
    *("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size", "spatial_merge_size"),
    *("temporal_patch_size", "in_channels", "num_position_embeddings"),
)


def config_json(name: str = "Qwen3_5ForConditionalGeneration", **changes: Any) -> dict[str, Any]:
    values = {"architectures": [name], "text_config": TEXT, "vision_config": VISION, **changes}
    return {key: value for key, value in values.items() if value is not None}


def directory_with(path: Path, preprocessor: Any, file: str = "preprocessor_config.json") -> Path:
    (path / file).write_text(json.dumps(preprocessor))
    return path


@pytest.mark.parametrize("config_class", [Qwen3_5Config, Qwen3_5MoeConfig, Qwen4ExpConfig])
def test_vision_fields_are_those_of_transformers(config_class: Any) -> None:
    name = config_class.__name__.replace("Config", "ForConditionalGeneration")
    expected = config_class(vision_config=VISION)
    found = parse_model_config(config_json(name)).vision
    assert found is not None
    assert [found.size(field) for field in SIZES] == [getattr(expected.vision_config, field) for field in SIZES]
    assert found.value("hidden_act") == expected.vision_config.hidden_act
    for token in ("image_token_id", "vision_start_token_id", "vision_end_token_id"):
        assert found.size(token) == getattr(expected, token)


def test_saved_files_and_other_spellings_are_read() -> None:
    saved = json.loads(Qwen3_5Config(vision_config={**VISION, "patch_size": 14}).to_json_string())
    found = parse_model_config({**config_json(), "vision_config": saved["vision_config"]}).vision
    assert found is not None
    assert found.size("patch_size") == 14
    others = {"num_hidden_layers": 5, "num_attention_heads": 8, "hidden_size": 32, "model_type": "qwen3_5"}
    found = parse_model_config(config_json(vision_config=others)).vision
    assert found is not None
    assert (found.size("depth"), found.size("num_heads")) == (5, 8)


@pytest.mark.parametrize("without", [{"vision_config": None}, {"language_model_only": True}])
def test_models_without_a_tower_read_no_pictures(tmp_path: Path, without: dict[str, Any]) -> None:
    config = parse_model_config(config_json(**without))
    assert config.vision is None
    assert read_picture_config(directory_with(tmp_path, PREPROCESSOR), config) is None


def test_other_families_read_no_pictures() -> None:
    text = {**TEXT, "num_key_value_heads": 2, "intermediate_size": 64}
    assert parse_model_config(config_json("Qwen3NextForCausalLM", **text)).vision is None


@pytest.mark.parametrize(
    ("file", "contents"),
    [
        ("preprocessor_config.json", PREPROCESSOR),
        ("processor_config.json", {"image_processor": PREPROCESSOR, "processor_class": "Qwen3VLProcessor"}),
        ("preprocessor_config.json", {**PREPROCESSOR, "size": None, "min_pixels": 65536, "max_pixels": 16777216}),
        ("preprocessor_config.json", {**PREPROCESSOR, "do_resize": True, "resample": 3, "rescale_factor": 1 / 255}),
    ],
)
def test_published_files_are_read(tmp_path: Path, file: str, contents: Any) -> None:
    found = read_picture_config(directory_with(tmp_path, contents, file), parse_model_config(config_json()))
    assert found == EXPECTED
    assert (EXPECTED.token_side, EXPECTED.max_tokens) == (32, 16384)


def test_nothing_is_assumed_where_no_file_says_it(tmp_path: Path) -> None:
    config = parse_model_config(config_json())
    assert read_picture_config(tmp_path, config) is None
    assert read_picture_config(directory_with(tmp_path, {"audio": {}}, "processor_config.json"), config) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 14}, r"preprocessor_config.json: patch_size is 14; it must be the vision tower's, 16"),
        ({"patch_size": None}, "patch_size is missing"),
        ({"merge_size": 1}, "merge_size"),
        ({"image_mean": None}, "image_mean"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std"),
        ({"size": {"shortest_edge": 65536}}, r"size.longest_edge is missing"),
        ({"size": {"shortest_edge": 65536, "longest_edge": 65535}}, r"size.longest_edge"),
        ({"size": {"shortest_edge": 1, "longest_edge": 1023}}, r"size.longest_edge"),
        ({"size": None}, r"size.shortest_edge is missing"),
        ({"size": 5}, "size"),
        ({"do_resize": False}, "do_resize"),
        ({"do_normalize": False}, "do_normalize"),
        ({"resample": 2}, "resample"),
        ({"rescale_factor": 0.5}, "rescale_factor"),
    ],
)
def test_files_of_other_kinds_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    contents = {key: value for key, value in {**PREPROCESSOR, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=f"{message}.*; with --language-model-only"):
        read_picture_config(directory_with(tmp_path, contents), parse_model_config(config_json()))


def test_tokens_around_pictures_are_in_the_vocabulary(tmp_path: Path) -> None:
    config = parse_model_config(config_json(image_token_id=10**6))
    with pytest.raises(ConfigError, match=r"image_token_id is 1000000"):
        read_picture_config(directory_with(tmp_path, PREPROCESSOR), config)
