"""Mixes of blocks in Triton equal the reference, whatever is given of the block under way.

``check`` runs on any device: tests/gpu runs it at a model's width. Blocks that are not finished are NaN.
"""

import pytest
import torch
from torch import Tensor

from strandline.kernels.streams.block_mixes import BlockMix, OpenBlock, mix_blocks

pytest.importorskip("triton")

from strandline.kernels.streams import block_mixes_triton

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Normalised numbers around 1 to 4; in bfloat16 they are rounded once."""


def check(
    num_blocks: int, num_queries: int, width: int, dtype: torch.dtype, device: str, *, given: str, num_tokens: int = 5
) -> None:
    generator = torch.Generator().manual_seed(width)

    def random(*shape: int, in_dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(in_dtype)

    blocks_TBE = random(num_tokens, 4, width)
    blocks_TBE[:, num_blocks:] = torch.nan
    sum_TE, added_TE = random(num_tokens, width, in_dtype=torch.float32), random(num_tokens, 2 * width)[:, :width]
    block = OpenBlock(sum_TE if "sum" in given else None, added_TE if "added" in given else None)
    query_QE = 2 * random(num_queries, width, in_dtype=torch.float32) if num_blocks else None
    mix = BlockMix(query_QE, 1 + 0.2 * random(num_queries, width), 1e-3)
    for total_dtype in (dtype, torch.float32):
        expected = mix_blocks.reference(blocks_TBE, num_blocks, block, mix, total_dtype)
        moved = (OpenBlock(*_moved(block, device)), BlockMix(*_moved(mix, device)))
        found = block_mixes_triton.mix_blocks(blocks_TBE.to(device), num_blocks, *moved, total_dtype)
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == y.dtype
            torch.testing.assert_close(x.cpu(), y, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def _moved(values: tuple[Tensor | float | None, ...], device: str) -> list[Tensor | float | None]:
    return [x.to(device) if isinstance(x, Tensor) else x for x in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", ["sum", "added", "sum added"])
@pytest.mark.parametrize(("num_blocks", "num_queries"), [(0, 1), (0, 3), (1, 1), (3, 3)])
def test_mixes_equal_the_definition(num_blocks: int, num_queries: int, given: str, dtype: torch.dtype) -> None:
    check(num_blocks, num_queries, 40, dtype, "cpu", given=given)


def test_token_does_not_depend_on_others() -> None:
    blocks_TBE, sum_TE = torch.randn(70, 3, 24), torch.randn(70, 24)
    mix = BlockMix(torch.randn(3, 24), torch.randn(3, 24), 1e-6)
    for version in (mix_blocks.reference, block_mixes_triton.mix_blocks):
        whole_QTE, _ = version(blocks_TBE, 2, OpenBlock(sum_TE, None), mix, torch.float32)
        for rows in (slice(0, 1), slice(3, 10), slice(63, 70)):
            part_QTE, _ = version(blocks_TBE[rows], 2, OpenBlock(sum_TE[rows], None), mix, torch.float32)
            assert torch.equal(part_QTE, whole_QTE[:, rows])
