"""Mixes of finished blocks of layers, which parts of a layer read instead of a residual stream.

Some layers make a block, whose parts' outputs are added up. A part reads a softmax-weighted sum of all finished blocks
and of the one under way, each normalised without weights; scores are products with a learnt query.

The reference implementation computes weights in float64: torch rounds a float32 ``exp`` differently at a tensor's end,
where it does not fill a vector, so that the bits of one token would depend on the batch around it.

Source: ``transformers`` (``inkling2``, its attention residuals).

Shape suffixes: T tokens of the step, B blocks, Q queries, E hidden size.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from strandline.kernels.operation import operation, triton

BLOCK_EPS: Final = 1e-6
"""Epsilon of the blocks' norm."""


class BlockMix(NamedTuple):
    """What a part reads."""

    query_QE: Tensor | None
    """In float32; the part has several inputs if there are several. None: there is one block, and it is the input."""
    norm_QE: Tensor
    """Weights of the norm of each input."""
    eps: float
    """Epsilon of that norm."""


class OpenBlock(NamedTuple):
    """The block under way: the sum of what is given."""

    sum_TE: Tensor | None
    added_TE: Tensor | None

    def total(self, dtype: torch.dtype) -> Tensor:
        """Return the sum, rounded once."""
        given = [x.float() for x in self if x is not None]
        return (given[0] + given[1] if len(given) > 1 else given[0]).to(dtype)


@operation(triton("streams.block_mixes_triton"))
def mix_blocks(
    blocks_TBE: Tensor, num_blocks: int, block: OpenBlock, mix: BlockMix, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the part's normalised inputs ``[Q, T, E]``, and the block under way.

    Args:
        num_blocks: how many of the blocks are finished; others are not read.
        dtype: dtype that the block under way is rounded to before it is read.
    """
    total_TE = block.total(dtype)
    if mix.query_QE is None:
        mixed_QTE = total_TE.float().expand(len(mix.norm_QE), -1, -1)
    else:
        normed = [_normalised(x.float(), BLOCK_EPS) for x in (*blocks_TBE[:, :num_blocks].unbind(1), total_TE)]
        score_QTB = torch.stack([(x * mix.query_QE.unsqueeze(1)).sum(-1) for x in normed], dim=-1)
        weight_QTB = (score_QTB.double() * total_TE.shape[-1] ** -0.5).softmax(-1).float()
        mixed_QTE = torch.zeros(*score_QTB.shape[:2], total_TE.shape[-1], device=total_TE.device)
        for weight_QT, x_TE in zip(weight_QTB.unbind(-1), normed, strict=True):
            mixed_QTE += weight_QT.unsqueeze(-1) * x_TE
    inputs_QTE = _normalised(mixed_QTE, mix.eps) * mix.norm_QE.unsqueeze(1)
    return inputs_QTE.to(blocks_TBE.dtype), total_TE


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
