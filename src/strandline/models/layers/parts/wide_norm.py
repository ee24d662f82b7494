"""Norms over channels that several ranks hold.

Shape suffixes: T tokens of the step, O channels of this rank, G groups of ranks.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.binding import Kernels
from strandline.kernels.rowwise.norm import rms_norm
from strandline.kernels.sizes import next_power_of_2
from strandline.models.layers.parts.shard import WHOLE, Shard

Norm = Callable[[Tensor, Tensor, float], Tensor]
"""Normalises the first tensor, given a weight and ``eps``."""


def rms_norm_over_ranks(kernels: Kernels) -> Norm:
    """Return ``rms_norm`` over the channels of all ranks; those that several hold count as often."""
    if kernels.ranks.size == 1:
        return kernels[rms_norm]
    mean_square = bind_mean_square(kernels)

    def norm(x_TO: Tensor, weight_O: Tensor, eps: float) -> Tensor:
        scale_T1 = mean_square(x_TO.float()).add_(eps).rsqrt_()
        return (x_TO.float() * scale_T1).to(x_TO.dtype) * weight_O

    return norm


def bind_mean_square(kernels: Kernels, group: Shard = WHOLE) -> Callable[[Tensor], Tensor]:
    """Return a function that returns the mean square ``[T, 1]`` over the channels of a group of ranks, given float32.

    Args:
        group: index of the group that this rank belongs to; all have as many ranks.
    """
    ranks, is_deterministic = kernels.ranks, kernels.workload.is_deterministic

    def mean_square(x_TO: Tensor) -> Tensor:
        square_TO = x_TO.square()
        sums_TG = x_TO.new_zeros(len(x_TO), group.count)
        sums_TG[:, group.index] = sum_in_halves(square_TO) if is_deterministic else square_TO.sum(-1)
        num_channels = x_TO.shape[1] * ranks.size // group.count
        return ranks.sum(sums_TG)[:, group.index, None] / num_channels

    return mean_square


def sum_in_halves(x_TO: Tensor) -> Tensor:
    """Return the sum ``[T]`` of each row, to the same bits for any number of rows.

    ``Tensor.sum`` divides a row among threads: among more of them, the fewer rows there are.
    """
    x_TO = F.pad(x_TO, (0, next_power_of_2(x_TO.shape[1]) - x_TO.shape[1]))
    while x_TO.shape[1] > 1:
        first_TO, second_TO = x_TO.chunk(2, dim=1)
        x_TO = first_TO + second_TO
    return x_TO[:, 0]
