"""Vision towers on a GPU: embeddings are those of a CPU in float32, within what bfloat16 can tell."""

import torch

from strandline.config_fields import Fields
from strandline.models.layers.parts.site import Site
from strandline.models.vision.tower import TowerConfig, VisionTower
from strandline.picture_config import PictureConfig

PICTURES = PictureConfig(
    patch_size=16,
    merge_size=2,
    min_pixels=2**16,
    max_pixels=2**24,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    image_token_id=1,
    start_token_id=2,
    end_token_id=3,
)
VISION = {
    "depth": 4,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2048,
}
TOLERANCE = 0.03
"""Root mean square of differences, relative to that of embeddings: bfloat16 has 8 bits, used in four blocks."""


def make_tower(dtype: torch.dtype, device: str) -> VisionTower:
    tower = VisionTower(TowerConfig.read(Fields(VISION), 2048), PICTURES, Site(dtype, device))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in tower.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        scale = 0.1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        parameter.data.copy_((values * scale + ("gain" in name)).bfloat16())
    return tower


def test_embeddings_are_those_of_a_cpu() -> None:
    pictures = [
        torch.randint(0, 256, (rows * 32, columns * 32, 3), dtype=torch.uint8) for rows, columns in ((8, 8), (5, 13))
    ]
    expected_NE = make_tower(torch.float32, "cpu")(pictures)
    tower = make_tower(torch.bfloat16, "cuda")
    found_NE = tower([pixels.cuda() for pixels in pictures])
    alone_NE = torch.cat([tower([pixels.cuda()]) for pixels in pictures])
    for found in (found_NE, alone_NE):
        difference = (found.float().cpu() - expected_NE).square().mean().sqrt()
        assert difference < TOLERANCE * expected_NE.square().mean().sqrt()
