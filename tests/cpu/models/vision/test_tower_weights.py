"""Vision towers load from published files, whatever the format of the text part's weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strandline.errors import WeightsError
from strandline.models.layers.parts.shard import Shard
from strandline.models.model_options import ModelOptions
from strandline.models.weights import FillOptions, load_model
from tests.cpu.device.picture_driver import PICTURES
from tests.cpu.models.families import save
from tests.cpu.models.fp8 import change_tensors
from tests.cpu.models.storage.test_fp8_storage import BLOCKS
from tests.cpu.models.storage.test_fp8_storage import save as save_in_fp8

NAME = "qwen3_5-vision"


def tower_tensors(directory: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Return the values that a loaded tower has, by their published names."""
    model: Any = load_model(directory, ModelOptions(dtype=torch.float32, pictures=PICTURES, **options))
    targets = dict(model.tower.targets("model.visual."))
    return {name: target.view for name, target in targets.items() if target.view is not None}


def published(directory: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.visual.")}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_every_tensor_of_a_tower_is_loaded(tmp_path: Path) -> None:
    directory = save(NAME, tmp_path)
    assert_equal(tower_tensors(directory), published(directory))


@pytest.mark.parametrize("index", [0, 1])
def test_every_rank_has_the_whole_tower(tmp_path: Path, index: int) -> None:
    directory = save(NAME, tmp_path)
    assert_equal(tower_tensors(directory, shard=Shard(index, 2)), published(directory))


@pytest.mark.parametrize("keeps_quantized", [False, True])
def test_towers_keep_their_dtype_in_quantized_files(tmp_path: Path, keeps_quantized: bool) -> None:
    directory = save_in_fp8(NAME, tmp_path, BLOCKS)
    expected = published(directory)
    assert {tensor.dtype for tensor in expected.values()} <= {torch.float32, torch.bfloat16}
    assert_equal(tower_tensors(directory, keeps_quantized=keeps_quantized), expected)


def test_tensors_of_towers_are_skipped_where_only_text_is_served(tmp_path: Path) -> None:
    directory = save(NAME, tmp_path)
    model = load_model(directory, ModelOptions(dtype=torch.float32))
    assert model.tower is None
    assert model.weights_report.skipped == {"model.visual.": len(published(directory))}


def test_missing_tensors_of_towers_are_named(tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.visual.")]:
            del tensors[name]

    directory = change_tensors(save(NAME, tmp_path), drop)
    with pytest.raises(WeightsError, match=r"model\.visual\.\S+ .* missing.*--language-model-only"):
        load_model(directory, ModelOptions(dtype=torch.float32, pictures=PICTURES))
    load_model(directory, ModelOptions(dtype=torch.float32))


def test_random_towers_give_embeddings_of_the_size_of_words(tmp_path: Path) -> None:
    model: Any = load_model(
        save(NAME, tmp_path), ModelOptions(dtype=torch.float32, pictures=PICTURES), FillOptions(load_format="dummy")
    )
    side = PICTURES.token_side
    pixels = torch.randint(0, 256, (2 * side, 3 * side, 3), dtype=torch.uint8)
    assert 0.01 < float(model.tower([pixels]).std()) < 10
