"""What pictures change about the rows of a step: where rotary embeddings see them, and whose embeddings they take.

Shape suffixes: T rows of the step, N sequences, K rows of pictures' tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
    """Return what a step's batch needs of pictures; None: all of its rows are text, apart from their positions.

    Args:
        token_ids_T: of all sequences; tokens of pictures become 0.
        delta_N: ``rotary_delta`` of each sequence; that of pictures which end before its rows is added.
    """
    is_picture_T = token_ids_T >= FIRST_VIRTUAL_ID
    near = [index for index, sequence in enumerate(sequences) if sequence.pictures]
    if not near and not is_picture_T.any():
        return None
    is_inside = False
    for index in near:
        start, end, pictures = sequences[index].start, sequences[index].end, sequences[index].pictures
        delta_N[index] += rotary_delta([span for span in pictures if span.end <= start])
        is_inside = is_inside or any(span.end > start and span.start < end for span in pictures)
    (rows_K,) = is_picture_T.nonzero()
    if not len(rows_K) and not is_inside:
        return None
    encoded_K = token_ids_T[rows_K] - FIRST_VIRTUAL_ID
    token_ids_T[rows_K] = 0
    rotary_3T = np.concatenate([_positions(sequence) for sequence in sequences], axis=1)
    return HostPictures(rows_K, encoded_K, rotary_3T.ravel())


def _positions(sequence: SequencePlan) -> np.ndarray:
    if not sequence.pictures:
        text = np.arange(sequence.start, sequence.end, dtype=np.int64) + sequence.rotary_delta
        return np.broadcast_to(text, (3, len(text)))
    found = rotary_positions(sequence.pictures, sequence.start, sequence.end)
    return np.array(found, dtype=np.int64) + sequence.rotary_delta
