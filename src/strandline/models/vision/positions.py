"""Where patches are in their picture: rotary angles in two dimensions, and weights of a table of learned embeddings.

Patches are ordered by tokens: those of a token's square of patches follow each other, row by row.

Source: ``transformers`` (``qwen3_5``).

Shape suffixes: R rows and C columns of patches, P patches, F frequencies of one dimension, K corners of a table's cell.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from strandline.kernels.rowwise.rotary import default_frequencies

THETA: Final = 1e4


class Grid(NamedTuple):
    """The patches of a picture."""

    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        return self.rows * self.columns


class TableEntries(NamedTuple):
    """The entries of a table that are mixed for each patch."""

    index_PK: Tensor
    weight_PK: Tensor
    """Float32; the weights of a patch add up to 1."""


def by_tokens(grid_RC: Tensor, merge_size: int) -> Tensor:
    """Return values of patches, given row by row, in the order of patches."""
    rows, columns = grid_RC.shape
    sides = (rows // merge_size, merge_size, columns // merge_size, merge_size)
    return grid_RC.reshape(sides).transpose(1, 2).reshape(-1)


def patch_coordinates(grid: Grid, merge_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row and the column of every patch, int64."""
    row_R = torch.arange(grid.rows, device=device)
    column_C = torch.arange(grid.columns, device=device)
    row_P = by_tokens(row_R[:, None].expand(grid), merge_size)
    return row_P, by_tokens(column_C.expand(grid), merge_size)


def frequencies_2d(head_dim: int) -> Tensor:
    """Return ``inv_freq_F``, float32: those of rows, and of columns."""
    return default_frequencies(THETA, head_dim // 2)


def rotary_2d(row_P: Tensor, column_P: Tensor, inv_freq_F: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine ``[P, 1, 2, 2 F]``, as ``apply_rotary`` takes them.

    The first half of a head's pairs turns with the row, the second with the column.
    """
    angle_PF2 = torch.cat([coordinate_P[:, None].float() * inv_freq_F for coordinate_P in (row_P, column_P)], dim=-1)
    sin_PF2 = angle_PF2.sin()
    cos_P1F2 = angle_PF2.cos()[:, None, None].expand(-1, 1, 2, -1)
    return cos_P1F2, torch.stack((-sin_PF2, sin_PF2), dim=1)[:, None]


def table_entries(row_P: Tensor, column_P: Tensor, grid: Grid, table_side: int) -> TableEntries:
    """Return where a square table is read, and with which weights, when it is stretched over a picture.

    Corners of the table and of the picture coincide; values between entries are interpolated bilinearly.
    """
    (top_P, down_P), (left_P, right_P) = (
        _between(coordinate_P, num_patches, table_side)
        for coordinate_P, num_patches in ((row_P, grid.rows), (column_P, grid.columns))
    )
    next_top_P, next_left_P = ((first_P + 1).clamp_(max=table_side - 1) for first_P in (top_P, left_P))
    corners = [
        (top_P, left_P, (1 - down_P) * (1 - right_P)),
        (top_P, next_left_P, (1 - down_P) * right_P),
        (next_top_P, left_P, down_P * (1 - right_P)),
        (next_top_P, next_left_P, down_P * right_P),
    ]
    index_PK = torch.stack([table_side * of_row_P + of_column_P for of_row_P, of_column_P, _ in corners], dim=1)
    return TableEntries(index_PK, torch.stack([weight_P for _, _, weight_P in corners], dim=1))


def _between(coordinate_P: Tensor, num_patches: int, table_side: int) -> tuple[Tensor, Tensor]:
    """Return the entry before each coordinate along an axis, and how far it is from there to the next one."""
    scaled_P = coordinate_P.float() * (table_side - 1) / max(num_patches - 1, 1)
    first_P = scaled_P.floor()
    return first_P.long(), scaled_P - first_P
