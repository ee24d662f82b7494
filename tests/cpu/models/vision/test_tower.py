"""Towers compute what transformers' do, for pictures of any size, alone or together."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5VisionConfig, Qwen3_5VisionModel

from strandline.config_fields import Fields
from strandline.errors import ConfigError
from strandline.models.layers.parts.site import Site
from strandline.models.vision.tower import TowerConfig, VisionTower
from strandline.picture_config import PictureConfig

PATCH, MERGE = 4, 2
SIDE = PATCH * MERGE
OUT = 20
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_heads": 2,
    "out_hidden_size": OUT,
    "patch_size": PATCH,
    "num_position_embeddings": 49,
}
PICTURES = PictureConfig(
    patch_size=PATCH,
    merge_size=MERGE,
    min_pixels=SIDE**2,
    max_pixels=100 * SIDE**2,
    mean=(0.5, 0.4, 0.3),
    std=(0.5, 0.25, 0.2),
    image_token_id=1,
    start_token_id=2,
    end_token_id=3,
)
SHAPES = [(1, 1), (1, 4), (3, 1), (2, 3), (7, 5), (4, 4)]
"""Tokens of pictures: rows and columns."""

TOLERANCE = 2e-5
"""Values are about 1, and sums of float32 in other orders."""


def random_oracle(**changes: Any) -> Qwen3_5VisionModel:
    torch.manual_seed(0)
    oracle = Qwen3_5VisionModel(Qwen3_5VisionConfig(**{**VISION, **changes})).eval().requires_grad_(False)
    for parameter in oracle.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        else:
            parameter.normal_(0, 1.5 * parameter[0].numel() ** -0.5)
    return oracle


def tower_of(oracle: Qwen3_5VisionModel) -> VisionTower:
    config = TowerConfig.read(Fields({**oracle.config.to_dict(), "deepstack_visual_indexes": []}), OUT)
    tower = VisionTower(config, PICTURES, Site(torch.float32, "cpu"))
    published = oracle.state_dict()
    targets = dict(tower.targets(""))
    assert targets.keys() == published.keys()
    for name, target in targets.items():
        assert target.shape == tuple(published[name].shape), name
        target.copy_from(lambda index, name=name: published[name][index])
    return tower


def random_picture(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rows + columns)
    return torch.randint(0, 256, (rows * SIDE, columns * SIDE, 3), dtype=torch.uint8, generator=generator)


def patches_of(picture: Tensor) -> Tensor:
    """Return the values of patches as transformers' tower takes them, one after the other."""
    normed = (picture.float() / 255 - torch.tensor(PICTURES.mean)) / torch.tensor(PICTURES.std)
    patches = []
    for top in range(0, picture.shape[0], SIDE):
        for left in range(0, picture.shape[1], SIDE):
            for row in range(top, top + SIDE, PATCH):
                for column in range(left, left + SIDE, PATCH):
                    patch = normed[row : row + PATCH, column : column + PATCH].permute(2, 0, 1)
                    patches.append(torch.stack((patch, patch), dim=1).flatten())
    return torch.stack(patches)


def encode(oracle: Qwen3_5VisionModel, pictures: list[Tensor]) -> Tensor:
    """Return what transformers makes of pictures."""
    grids = [[1, picture.shape[0] // PATCH, picture.shape[1] // PATCH] for picture in pictures]
    embedded: Tensor = oracle(torch.cat([*map(patches_of, pictures)]), grid_thw=torch.tensor(grids)).pooler_output
    return embedded


@pytest.mark.parametrize("shape", SHAPES)
def test_pictures_are_encoded_as_by_transformers(shape: tuple[int, int]) -> None:
    oracle, picture = random_oracle(), random_picture(*shape)
    expected = encode(oracle, [picture])
    assert expected.shape == (shape[0] * shape[1], OUT)
    torch.testing.assert_close(tower_of(oracle)([picture]), expected, rtol=0, atol=TOLERANCE)


def test_pictures_of_one_call_do_not_see_each_other() -> None:
    oracle, pictures = random_oracle(), [random_picture(*shape) for shape in SHAPES]
    tower = tower_of(oracle)
    found = tower(pictures)
    torch.testing.assert_close(found, encode(oracle, pictures), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(found, torch.cat([tower([picture]) for picture in pictures]), rtol=0, atol=TOLERANCE)


def test_rows_and_columns_are_told_apart() -> None:
    tower, picture = tower_of(random_oracle()), random_picture(3, 3)
    turned = tower([picture.transpose(0, 1).contiguous()]).view(3, 3, OUT).transpose(0, 1).reshape(9, OUT)
    assert not torch.allclose(tower([picture]), turned, atol=0.1)


def test_heads_need_not_be_powers_of_two_wide() -> None:
    oracle = random_oracle(hidden_size=144, num_heads=2)
    picture = random_picture(2, 5)
    torch.testing.assert_close(tower_of(oracle)([picture]), encode(oracle, [picture]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_position_embeddings", 50),
        ("num_heads", 5),
        ("num_heads", 12),
        ("in_channels", 1),
        ("out_hidden_size", OUT + 1),
        ("hidden_act", "gelu"),
        ("deepstack_visual_indexes", [1]),
        ("depth", 0),
    ],
)
def test_towers_of_other_kinds_are_refused(name: str, value: Any) -> None:
    fields = {**Qwen3_5VisionConfig(**VISION).to_dict(), "deepstack_visual_indexes": [], name: value}
    with pytest.raises(ConfigError, match=name):
        TowerConfig.read(Fields(fields), OUT)
