"""Clips of heads: vectors that are longer than a threshold are scaled down to it.

Source: ``transformers`` (``inkling2``).

Shape suffixes: T tokens, H heads, D head dim.
"""

from typing import Final

from torch import Tensor

from strandline.kernels.operation import operation, triton

CLIP_EPS: Final = 1e-6
"""Added to a vector's length."""


@operation(triton("rowwise.head_clip_triton"))
def clip_heads(
    x_THD: Tensor, threshold: float, scale_HD: Tensor | None = None, factor_T: Tensor | None = None
) -> Tensor:
    """Return heads that are no longer than the threshold, in float32 and rounded, then multiplied and rounded.

    Args:
        scale_HD: multiplies heads before they are clipped; None: nothing does.
        factor_T: in float32; multiplies them after that; None: nothing does.
    """
    x = x_THD.float() if scale_HD is None else x_THD.float() * scale_HD.float()
    length_TH1 = x.square().sum(-1, keepdim=True).sqrt()
    clipped = (x * (threshold / (length_TH1 + CLIP_EPS)).clamp_(max=1.0)).to(x_THD.dtype)
    return clipped if factor_T is None else (clipped.float() * factor_T.view(-1, 1, 1)).to(clipped.dtype)
