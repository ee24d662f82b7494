"""The chunk table: the partition of prefill tokens into chunks of at most 64.

Chunk boundaries lie on the absolute 64-token grid of each sequence and at every cut, so that the partition up to any
position does not depend on how the prompt was split into steps. After a chunk that ends at a cut, the recurrent kernels
store the state in the cut's slot.

Shape suffixes: N sequences, C chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strandline.ids import BLOCK_TOKENS

CHUNK_TOKENS = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Chunks of all prefill sequences of a step, sequence after sequence.

    Rows count from the first prefill token. The tuples are host copies of the int64 device tensors; in padded steps,
    which a CUDA graph replays for others, they are those of a likely step with as much room.
    """

    first_chunks: tuple[int, ...]
    """N + 1 offsets: sequence ``i`` owns chunks ``[first_chunks[i], first_chunks[i + 1])``.

    Padded steps have sequences without tokens, which own none; ``first_chunks[i]`` is an empty chunk, then."""
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    """A sequence's last chunk may be empty in padded steps that verify drafts; nothing is computed of it."""
    cut_slots: tuple[int, ...]
    """Slot that receives the state after the chunk; 0 if there is no cut."""
    first_chunks_N1: Tensor
    starts_C: Tensor
    lengths_C: Tensor
    cut_slots_C: Tensor
    is_short: bool = False
    """Whether every sequence has only a few tokens, so that computing them one by one is fastest."""

    @property
    def num_sequences(self) -> int:
        return len(self.first_chunks) - 1


@dataclass(frozen=True, slots=True)
class Chunks:
    """A chunk table's columns on the host."""

    first_chunks: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    cut_slots: tuple[int, ...]
    is_short: bool = False

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        return (self.first_chunks, self.starts, self.lengths, self.cut_slots)

    def with_tensors(self, tensors: Sequence[Tensor]) -> ChunkTable:
        """Return the table, given its columns as int64 tensors."""
        first_chunks, starts, lengths, cut_slots = tensors
        return ChunkTable(
            self.first_chunks,
            self.starts,
            self.lengths,
            self.cut_slots,
            first_chunks,
            starts,
            lengths,
            cut_slots,
            self.is_short,
        )


def plan_chunks(ranges: Sequence[tuple[int, int]], cuts: Sequence[Sequence[tuple[int, int]]]) -> Chunks:
    """Cut each sequence's new tokens into chunks.

    Args:
        ranges: per sequence, the absolute token range ``[start, end)`` of the step, ``start < end``.
        cuts: per sequence, ``(position, slot)`` pairs in rising order with ``start < position <= end``.

    Raises:
        ValueError: a cut lies outside its sequence's range or out of order.
    """
    first_chunks, starts, lengths, slots = [0], list[int](), list[int](), list[int]()
    row = 0
    for (start, end), sequence_cuts in zip(ranges, cuts, strict=True):
        slot_at = dict(sequence_cuts)
        positions = [position for position, _ in sequence_cuts]
        if positions != sorted(set(positions)) or any(not start < p <= end for p in positions):
            raise ValueError(f"cuts {positions} must rise within ({start}, {end}]")
        position = start
        while position < end:
            grid = (position // CHUNK_TOKENS + 1) * CHUNK_TOKENS
            stop = min([end, grid, *(p for p in positions if p > position)])
            starts.append(row)
            lengths.append(stop - position)
            slots.append(slot_at.get(stop, 0))
            row += stop - position
            position = stop
        first_chunks.append(len(starts))
    return Chunks(tuple(first_chunks), tuple(starts), tuple(lengths), tuple(slots))


def build_chunk_table(
    ranges: Sequence[tuple[int, int]],
    cuts: Sequence[Sequence[tuple[int, int]]],
    device: torch.device | str = "cpu",
) -> ChunkTable:
    """Cut each sequence's new tokens into chunks, as :func:`plan_chunks`, and make the table."""
    chunks = plan_chunks(ranges, cuts)
    return chunks.with_tensors([torch.tensor(c, dtype=torch.int64, device=device) for c in chunks.columns])
