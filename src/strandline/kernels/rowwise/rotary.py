"""Rotary position embedding of the first channels of each head, in the half-split form.

Channel ``f`` and channel ``F + f`` of a head form a pair that is rotated by ``position * frequency[f]``. Models of
pictures give each token a position in time, height and width (mrope), and each pair one of the three. They are equal
for tokens of text, which are rotated as in other models, to the bit.

Source: Su et al., "RoFormer", section 3.4; ``transformers`` for the half-split pairing, and for how dimensions are
interleaved.

Shape suffixes: T tokens, H heads, D head dim, F rotated pairs per head (2 F <= D).
"""

import torch
from torch import Tensor

from strandline.kernels.operation import operation, triton


def default_frequencies(theta: float, rotary_dim: int) -> Tensor:
    """Return ``inv_freq_F``, float32: ``theta ** (-2 f / rotary_dim)``."""
    return 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))


@operation(triton("rowwise.rotary_triton"))
def rotary_table(positions_T: Tensor, inv_freq_F: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine ``[T, 1, 2, F]``, float32, as :func:`apply_rotary` takes them.

    Args:
        attention_factor: multiplies both; 1 but for scaled kinds of rotary embedding.
    """
    return table_of_pairs(positions_T.view(-1, 1), inv_freq_F, attention_factor)


@operation(triton("rowwise.rotary_triton"))
def rotary_table_3d(
    positions_T: Tensor, offsets_3T: Tensor, dimension_F: Tensor, inv_freq_F: Tensor, attention_factor: float
) -> tuple[Tensor, Tensor]:
    """Return what :func:`rotary_table` does, of positions in three dimensions.

    Args:
        offsets_3T: int64, contiguous: what is added to positions for time, height and width.
        dimension_F: int64, the dimension of each pair.
    """
    return table_of_pairs((positions_T + offsets_3T)[dimension_F].T, inv_freq_F, attention_factor)


def table_of_pairs(positions_TF: Tensor, inv_freq_F: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """Return what :func:`rotary_table` does, of a position for each pair."""
    # The sine of the opposite angle is the sine with its sign changed.
    signed_freq_2F = torch.stack((-inv_freq_F, inv_freq_F))
    angle_T12F = positions_TF.float()[:, None, None] * signed_freq_2F
    cos_T12F, sin_T12F = angle_T12F.cos(), angle_T12F.sin()
    if attention_factor != 1.0:
        cos_T12F, sin_T12F = cos_T12F * attention_factor, sin_T12F * attention_factor
    return cos_T12F, sin_T12F


def interleaved_dimensions(num_pairs: int, sections: tuple[int, int, int]) -> Tensor:
    """Return ``dimension_F``, int64: every third pair is of height, every third of width, as long as there are any.

    Args:
        sections: numbers of pairs of time, height and width.
    """
    dimension_F = torch.zeros(num_pairs, dtype=torch.int64)
    for dimension in (1, 2):
        dimension_F[dimension : 3 * sections[dimension] : 3] = dimension
    return dimension_F


def apply_rotary(x_THD: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first ``2 F`` channels of every head in place, in float32; return ``x_THD``."""
    cos_T12F, sin_T12F = table
    num_pairs = cos_T12F.shape[-1]
    pairs_TH2F = x_THD[..., : 2 * num_pairs].unflatten(-1, (2, num_pairs))
    rotated_TH2F = pairs_TH2F * cos_T12F
    pairs_TH2F.copy_(rotated_TH2F.addcmul_(pairs_TH2F.flip(-2), sin_T12F))
    return x_THD
