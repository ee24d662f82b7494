"""What pictures change about the rows of a step: where rotary embeddings see them, and whose embeddings they take.

Shape suffixes: T rows of the step, N sequences, K rows of pictures' tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from strandline.device.upload import upload_together
from strandline.kernels.batch import PictureRows
from strandline.records.pictures import FIRST_VIRTUAL_ID, rotary_delta, rotary_positions
from strandline.records.plan import SequencePlan


class HostPictures(NamedTuple):
    """The rows of pictures' tokens, and the positions of all rows; int64."""

    rows_K: np.ndarray
    encoded_K: np.ndarray
    """Rows of the memory of encoded pictures."""
    rotary: np.ndarray
    """Positions for rotary embeddings: times of all rows, then heights, then widths."""


def take_pictures(
    sequences: Sequence[SequencePlan], token_ids_T: np.ndarray, delta_N: np.ndarray
) -> HostPictures | None:
    """Return what a step's batch needs of pictures; None: all of its rows are text.

    Args:
        token_ids_T: of all sequences; tokens of pictures become 0.
        delta_N: ``rotary_delta`` of each sequence; becomes that of its first row, if that is text.
    """
    add_earlier_pictures(sequences, delta_N)
    (rows_K,) = (token_ids_T >= FIRST_VIRTUAL_ID).nonzero()
    if not len(rows_K) and not any(map(has_picture_rows, sequences)):
        return None
    encoded_K = token_ids_T[rows_K] - FIRST_VIRTUAL_ID
    token_ids_T[rows_K] = 0
    rotary_3T = np.concatenate([_positions(sequence) for sequence in sequences], axis=1)
    return HostPictures(rows_K, encoded_K, rotary_3T.ravel())


def add_earlier_pictures(sequences: Sequence[SequencePlan], delta_N: np.ndarray) -> None:
    """Add to ``rotary_delta`` what pictures add that end before a sequence's rows."""
    for index, sequence in enumerate(sequences):
        if sequence.pictures:
            delta_N[index] += rotary_delta([span for span in sequence.pictures if span.end <= sequence.start])


def has_picture_rows(sequence: SequencePlan) -> bool:
    """Whether a sequence computes tokens of pictures."""
    return any(span.end > sequence.start and span.start < sequence.end for span in sequence.pictures)


def rotary_and_rows(
    pictures: HostPictures | None, rotary_T: Tensor, device: torch.device
) -> tuple[Tensor, PictureRows | None]:
    """Return a batch's ``rotary`` and ``pictures``.

    Args:
        rotary_T: positions of text.
    """
    if pictures is None:
        return rotary_T, None
    rows_K, encoded_K, rotary = upload_together(pictures, device)
    return rotary.view(3, -1), PictureRows(rows_K, encoded_K)


def _positions(sequence: SequencePlan) -> np.ndarray:
    if not sequence.pictures:
        text = np.arange(sequence.start, sequence.end, dtype=np.int64) + sequence.rotary_delta
        return np.broadcast_to(text, (3, len(text)))
    found = rotary_positions(sequence.pictures, sequence.start, sequence.end)
    return np.array(found, dtype=np.int64) + sequence.rotary_delta
