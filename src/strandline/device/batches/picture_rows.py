"""Where rotary embeddings see the rows of a step with pictures.

Shape suffixes: T rows of the step, N sequences.
"""

from collections.abc import Sequence

import numpy as np

from strandline.records.pictures import rotary_delta, rotary_positions
from strandline.records.plan import SequencePlan


def rotary_offsets(sequences: Sequence[SequencePlan], delta_N: np.ndarray) -> np.ndarray | None:
    """Turn each sequence's ``rotary_delta`` into that of a token of text at its ``start``, in place.

    Returns:
        What time, height and width add to the rows' positions, one after the other; None: all rows are of text. The
        positions that they are added to include the deltas.
    """
    if not any(sequence.pictures for sequence in sequences):
        return None
    for index, sequence in enumerate(sequences):
        if sequence.pictures:
            delta_N[index] += rotary_delta([span for span in sequence.pictures if span.end <= sequence.start])
    if not any(map(takes_picture, sequences)):
        return None
    parts = [_offsets(*each) for each in zip(sequences, delta_N.tolist(), strict=True)]
    return np.concatenate(parts, axis=1).ravel()


def takes_picture(sequence: SequencePlan) -> bool:
    """Whether tokens of pictures are among a sequence's rows, or, for a draft layer, after these."""
    return any(span.end > sequence.start and span.start <= sequence.end for span in sequence.pictures)


def _offsets(sequence: SequencePlan, delta: int) -> np.ndarray:
    start, end = sequence.start, sequence.end
    if not sequence.pictures:
        return np.zeros((3, end - start), dtype=np.int64)
    positions_3T = np.array(rotary_positions(sequence.pictures, start, end), dtype=np.int64)
    return positions_3T + (sequence.rotary_delta - delta) - np.arange(start, end)
