"""Convolutions of blocks of drafts."""

import torch

from strandline.models.drafters.block_convolution import convolve


def test_blocks_do_not_read_rows_of_others() -> None:
    x_TE, filters_TWE = torch.randn(6, 4), torch.randn(6, 3, 4)
    index_T = torch.tensor([0, 1, 2, 0, 1, 2])
    expected_TE = convolve(x_TE, filters_TWE, index_T)
    for poisoned, clean in ((slice(0, 3), slice(3, 6)), (slice(3, 6), slice(0, 3))):
        poisoned_TE = x_TE.clone()
        poisoned_TE[poisoned] = torch.nan
        assert convolve(poisoned_TE, filters_TWE, index_T)[clean].equal(expected_TE[clean])
