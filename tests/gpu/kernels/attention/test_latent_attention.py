"""The cases of attention over latents in Triton on a GPU, and steps at Kimi-Linear's shape."""

from dataclasses import replace

import pytest
import torch

from tests.cpu.kernels.attention import test_latent_attention_triton as cases
from tests.cpu.kernels.attention.test_latent_attention_triton import Shape, check, decodes, make_case

KIMI = Shape(num_heads=32, num_channels=576, value_dim=512)
ODD = Shape(num_heads=5, num_channels=20, value_dim=13)

SHAPES = pytest.mark.parametrize(
    ("shape", "dtype"),
    [(ODD, torch.float32), (ODD, torch.bfloat16), (KIMI, torch.bfloat16)],
    ids=["odd-float32", "odd-bfloat16", "kimi-bfloat16"],
)


@SHAPES
@pytest.mark.parametrize("contexts", [(700,), (1, 63, 64, 65, 2500), (130,) * 70], ids=str)
def test_decodes_equal_the_definition(shape: Shape, dtype: torch.dtype, contexts: tuple[int, ...]) -> None:
    check(make_case(decodes(*contexts), len(contexts), shape=shape, dtype=dtype, device="cuda"))


@SHAPES
@pytest.mark.parametrize("ranges", [[(0, 1)], [(0, 300), (90, 128)], [(63, 65), (1030, 1200)]], ids=str)
def test_prefills_equal_the_definition(shape: Shape, dtype: torch.dtype, ranges: list[cases.Range]) -> None:
    check(make_case(ranges, 0, shape=shape, dtype=dtype, device="cuda"))


@SHAPES
@pytest.mark.parametrize("most_rows", [None, 4])
def test_mixed_steps_equal_the_definition(shape: Shape, dtype: torch.dtype, most_rows: int | None) -> None:
    ranges = [*decodes(400, 1, 70), (100, 104), (60, 63), (0, 1)]
    case = make_case(ranges, 3, shape=shape, dtype=dtype, device="cuda")
    check(replace(case, batch=replace(case.batch, most_rows=most_rows)))


@SHAPES
def test_empty_contexts_give_zeros_and_store_nothing(shape: Shape, dtype: torch.dtype) -> None:
    cases.check_padding(shape, dtype, "cuda")


@SHAPES
def test_deterministic_bits_do_not_depend_on_the_step(shape: Shape, dtype: torch.dtype) -> None:
    ranges = [*decodes(64, 1100, 2500), (0, 300), (128, 500), (0, 1)]
    cases.check_invariance(shape, dtype, "cuda", ranges, 3)
