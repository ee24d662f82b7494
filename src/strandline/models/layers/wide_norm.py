"""Norms over channels that several ranks hold.

Shape suffixes: T tokens of the step, O channels of this rank, G groups of ranks.
"""

from collections.abc import Callable

from torch import Tensor

from strandline.kernels.binding import Kernels
from strandline.kernels.norm import rms_norm
from strandline.kernels.ranks import Ranks
from strandline.models.shard import WHOLE, Shard

Norm = Callable[[Tensor, Tensor, float], Tensor]
"""Normalises the first tensor, given a weight and ``eps``."""


def rms_norm_over_ranks(kernels: Kernels) -> Norm:
    """Return ``rms_norm`` over the channels of all ranks; those that several hold count as often."""
    ranks, alone = kernels.ranks, kernels[rms_norm]
    if ranks.size == 1:
        return alone

    def norm(x_TO: Tensor, weight_O: Tensor, eps: float) -> Tensor:
        scale_T1 = mean_square(x_TO.float(), ranks).add_(eps).rsqrt_()
        return (x_TO.float() * scale_T1).to(x_TO.dtype) * weight_O

    return norm


def mean_square(x_TO: Tensor, ranks: Ranks, group: Shard = WHOLE) -> Tensor:
    """Return the mean square ``[T, 1]`` over the channels of a group of ranks.

    Args:
        x_TO: float32.
        group: which of the groups this rank belongs to; all have as many ranks.
    """
    sums_TG = x_TO.new_zeros(len(x_TO), group.count)
    sums_TG[:, group.index] = x_TO.square().sum(-1)
    num_channels = x_TO.shape[1] * ranks.size // group.count
    return ranks.sum(sums_TG)[:, group.index, None] / num_channels
