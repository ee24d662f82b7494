"""Attention to keys and values computed again from latents, in Triton on a GPU, also at Kimi-Linear's shape."""

import pytest
import torch

from strandline.kernels.attention import latent_expansion_triton
from tests.cpu.kernels.attention.test_latent_attention_triton import Range, decodes
from tests.cpu.kernels.attention.test_latent_expansion import Shape, check, make

KIMI = Shape(32, 512, 64, 128, 128)
ODD = Shape(5, 20, 3, 13, 7)

SHAPES = pytest.mark.parametrize(
    ("shape", "dtype"),
    [(ODD, torch.float32), (ODD, torch.bfloat16), (KIMI, torch.bfloat16)],
    ids=["odd-float32", "odd-bfloat16", "kimi-bfloat16"],
)

attend = latent_expansion_triton.expanded_latent_attention


@SHAPES
@pytest.mark.parametrize("ranges", [[(0, 1)], [(0, 300), (90, 1128), (0, 128)], [(63, 65), (1030, 1500)]], ids=str)
def test_prefills_equal_the_definition(shape: Shape, dtype: torch.dtype, ranges: list[Range]) -> None:
    check(make(ranges, shape=shape, dtype=dtype, device="cuda"), attend)


@SHAPES
def test_pieces_continue_each_other(shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_expansion_triton, "piece_keys", lambda *_: 192)
    check(make([*decodes(400, 1), (0, 200), (300, 700), (0, 1)], 2, shape=shape, dtype=dtype, device="cuda"), attend)
