"""Attention to keys and values computed again from latents, in Triton; the cases are those of the reference."""

import pytest
import torch

from strandline.kernels.attention import latent_expansion
from strandline.kernels.attention.tiles_triton import Tile
from strandline.kernels.gpu import GPUS, standing_for
from tests.cpu.kernels.attention.test_latent_attention_triton import Range, decodes
from tests.cpu.kernels.attention.test_latent_expansion import RANGES, Shape, check, make

pytest.importorskip("triton")

from strandline.kernels.attention import latent_expansion_triton

attend = latent_expansion_triton.expanded_latent_attention


@pytest.mark.parametrize(("ranges", "num_decodes"), RANGES, ids=str)
def test_prefills_equal_the_definition(ranges: list[Range], num_decodes: int) -> None:
    check(make(ranges, num_decodes), attend)


@pytest.mark.parametrize("num_keys", [64, 100, 192])
def test_pieces_continue_each_other(monkeypatch: pytest.MonkeyPatch, num_keys: int) -> None:
    case = make([*decodes(70), (0, 40), (90, 170), (200, 203)], 1)
    whole_THV = check(case, attend)
    monkeypatch.setattr(latent_expansion_triton, "piece_keys", lambda *_: num_keys)
    torch.testing.assert_close(check(case, attend), whole_THV, rtol=0, atol=1e-5)
    name = ("pieces of latents", 1, num_keys)
    assert len(case.batch.gathers[name][1]) == -(-(40 + 170 + 203) // num_keys)


@pytest.mark.parametrize("shape", [Shape(1, 20, 1, 16, 17), Shape(2, 16, 16, 32, 16)], ids=str)
def test_other_shapes_equal_the_definition(shape: Shape) -> None:
    check(make([(0, 20), (60, 90)], shape=shape), attend)


def test_tiles_of_bfloat16_stay_close_to_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_expansion_triton, "TILE", Tile(32, 32, 4, 1))
    case = make([(0, 90), (100, 150)], shape=Shape(2, 16, 16, 32, 16), dtype=torch.bfloat16)
    check(case, attend)


def test_a_piece_holds_one_block_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make([(0, 1)])
    monkeypatch.setattr(latent_expansion, "PIECE_BYTES", 1)
    assert latent_expansion.piece_keys(*case.ups) == 64


@pytest.mark.parametrize(
    ("key_dim", "architecture", "rows"), [(256, "sm_90", 128), (256, "sm_120", 64), (192, "sm_120", 128)]
)
def test_prefills_take_the_tile_that_fits(key_dim: int, architecture: str, rows: int) -> None:
    with standing_for(GPUS[architecture]):
        q_THD = torch.empty(70, 8, key_dim, dtype=torch.bfloat16, device="meta")
        assert latent_expansion_triton._tile(q_THD).rows == rows
