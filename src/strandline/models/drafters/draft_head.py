"""Output heads of drafts: of a drafter that has its own, for all tokens or frequent ones alone; or the model's in FP8.

Shape suffixes: N rows, E hidden size of the drafter, V tokens that are drafted, Z tokens of this rank's logits; of
a weight, O outputs and I inputs.
"""

from typing import Final

import torch
from torch import Tensor, nn

from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.weights import ScaledWeight
from strandline.kernels.ranks import columns_of
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets
from strandline.models.storage.quantizers import Fp8Quantizer

ROWS_AT_ONCE: Final = 1 << 13
"""Rows of a head that are rounded at a time: a multiple of those that share a scale."""


def rounded_head(weight_OI: Tensor) -> ScaledWeight:
    """Return an output head in FP8. Drafts are verified, so that rounding changes none of the outputs."""
    quantizer, largest = Fp8Quantizer(), torch.zeros((), device=weight_OI.device)
    parts = [quantizer.quantize(rows, largest).parts for rows in weight_OI.split(ROWS_AT_ONCE)]
    return ScaledWeight(torch.cat([part[""] for part in parts]), torch.cat([part["_scale_inv"] for part in parts]))


class DraftHead(nn.Module):
    """Computes logits of the model's vocabulary from those of the tokens that are drafted.

    Args:
        num_drafted: number of tokens that are drafted.
        vocab_size: size of the model's vocabulary.
    """

    draft_ids_V: Tensor
    """Ids of these tokens; at first, the first ones."""

    def __init__(self, num_drafted: int, hidden_size: int, vocab_size: int, site: Site) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.projection = Projection(num_drafted, hidden_size, site)
        self.register_buffer("draft_ids_V", torch.arange(num_drafted, device=site.device), persistent=False)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute for these ranks from now on."""
        self._ranks = kernels.ranks

    def logits(self, normed_NE: Tensor) -> Tensor:
        """Return logits of this rank's part of the vocabulary, minus infinity where no token is drafted."""
        return self.on_own_columns(self.projection.multiply(normed_NE))

    def on_own_columns(self, values_NV: Tensor) -> Tensor:
        """Return values of the tokens that are drafted in the columns of this rank's logits, as ``logits`` does."""
        columns = columns_of(self.vocab_size, self._ranks.rank, self._ranks.size)
        return on_columns(values_NV, self.draft_ids_V.expand_as(values_NV), columns)

    def targets(self) -> NamedTargets:
        """Yield the published tensors except ``d2t``."""
        yield from self.projection.targets("lm_head.")


def on_columns(values_NV: Tensor, ids_NV: Tensor, columns: range) -> Tensor:
    """Return values in the columns of some of the vocabulary, minus infinity in others.

    Args:
        ids_NV: the token of each value.
        columns: tokens that have a column.
    """
    # Other tokens go to one more column.
    index_NV = ids_NV - columns.start
    index_NV = torch.where((index_NV >= 0) & (index_NV < len(columns)), index_NV, len(columns))
    columns_NZ = values_NV.new_full((len(values_NV), len(columns) + 1), -torch.inf)
    return columns_NZ.scatter_(1, index_NV, values_NV)[:, :-1].contiguous()
