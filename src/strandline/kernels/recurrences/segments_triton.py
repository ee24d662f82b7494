"""Segments of sequences, for Triton kernels of recurrences whose states are sums over tokens.

A kernel that walks through a sequence leaves most of a GPU idle where sequences and channels are few. Sequences of many
chunks are then divided into segments of as many chunks each. A run without outputs, of all segments but the last at
once, gives every segment's state as from zeros and the decay of the state before it. The run proper starts each
segment from the sum of those ahead, which it adds in their order.

Invariants: a segment is empty or begins at a chunk. The runs read a sequence's initial state from a copy, which the
first run makes: ``dst`` may be ``src``, and segments run in any order. Where engines are deterministic sequences are
not divided, since the number of segments depends on the step.
"""
# mypy: ignore-errors

from collections.abc import Iterator
from typing import NamedTuple

import triton
import triton.language as tl

from strandline.kernels.operation import Launches
from strandline.kernels.state_triton import without_empty


class Division(NamedTuple):
    """How far sequences are divided."""

    wanted_programs: int
    """No further than up to this."""
    min_chunks: int
    """Chunks of a segment, at least, of sequences of average length."""
    max_segments: int


def divide(
    division: Division,
    num_programs: int,
    num_sequences: int,
    num_chunks: int,
    launches: Launches = Launches.MEASURED,
) -> int:
    """Return how many segments every sequence is divided into: one, if launches are fixed.

    Args:
        num_programs: with one segment.
        num_chunks: number of chunks of all sequences.
    """
    if launches is Launches.FIXED:
        return 1
    most = num_chunks // (max(1, num_sequences) * division.min_chunks)
    return max(1, min(division.wanted_programs // max(1, num_programs), most, division.max_segments))


def runs(num_segments: int) -> Iterator[tuple[int, dict[str, bool]]]:
    """Yield, launch by launch, how many segments of each sequence it walks through, and its constants."""
    if num_segments > 1:
        yield num_segments - 1, {"IS_PARTIAL": True, "IS_DIVIDED": True}
    yield num_segments, {"IS_PARTIAL": False, "IS_DIVIDED": num_segments > 1}


@triton.jit
def chunks_of_segment(first_chunks_ptr, lengths_ptr, sequence, segment, num_segments, IS_DIVIDED: tl.constexpr):
    """Return the first chunk and the end of those of a sequence's segment, without an empty chunk at the end."""
    first = tl.load(first_chunks_ptr + sequence).to(tl.int32)
    end = without_empty(first, tl.load(first_chunks_ptr + sequence + 1).to(tl.int32), lengths_ptr)
    if IS_DIVIDED:
        num_chunks = tl.cdiv(end - first, num_segments)
        first = tl.minimum(first + segment * num_chunks, end)
        end = tl.minimum(first + num_chunks, end)
    return first, end
