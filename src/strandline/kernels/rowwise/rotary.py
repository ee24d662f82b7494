"""Rotary position embedding of the first channels of each head, in the half-split form.

Channel ``f`` and channel ``F + f`` of a head form a pair that is rotated by ``position * frequency[f]``. Models whose
positions have a time, a height and a width component (mrope) rotate text tokens, where the three are equal, in the
same way.

Source: Su et al., "RoFormer", section 3.4; ``transformers`` for the half-split pairing.

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
    # The sine of the opposite angle is the sine with its sign changed.
    signed_freq_2F = torch.stack((-inv_freq_F, inv_freq_F))
    angle_T12F = positions_T.float().view(-1, 1, 1, 1) * signed_freq_2F
    cos_T12F, sin_T12F = angle_T12F.cos(), angle_T12F.sin()
    if attention_factor != 1.0:
        cos_T12F, sin_T12F = cos_T12F * attention_factor, sin_T12F * attention_factor
    return cos_T12F, sin_T12F


def apply_rotary(x_THD: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first ``2 F`` channels of every head in place, in float32; return ``x_THD``."""
    cos_T12F, sin_T12F = table
    num_pairs = cos_T12F.shape[-1]
    pairs_TH2F = x_THD[..., : 2 * num_pairs].unflatten(-1, (2, num_pairs))
    rotated_TH2F = pairs_TH2F * cos_T12F
    pairs_TH2F.copy_(rotated_TH2F.addcmul_(pairs_TH2F.flip(-2), sin_T12F))
    return x_THD
