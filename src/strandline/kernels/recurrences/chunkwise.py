"""Linear recurrences with a decay per head, chunk after chunk, in plain torch: what their references share.

A recurrence brings the mathematics of one chunk, or of one token; here are the walk over the sequences of a step, the
states that are read and written, and the decays between the tokens of a chunk.

Invariants: the null slot reads as zeros, and its memory is neither read nor written (a null ``dst`` drops the state); a
slot is written only as some sequence's ``dst`` or as a cut; every source is read as it was before the call. States are
float32 while they are computed with, and rounded where they are stored.

Shape suffixes: T tokens, M tokens of one chunk, N sequences, H heads, S slots, X the dimensions of one state.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import ChunkTable

FLOAT32_STATE: Final = {"state": ("float32",)}
"""What Numba kernels support: they read and write a state where it lies."""

MIN_LOG_DECAY: Final = -1e6
"""Stands for minus infinity: ``exp`` of it is 0, and differences of sums of it are numbers."""

MIN_EXPONENT: Final = -80.0
"""Between two tokens of a chunk, less decay than this: no float32 sum shows it, and ``exp`` of it would be a subnormal
number, which takes a CPU ten times as long."""

Advance = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""Returns the state after some rows, one sequence's next ones, and their outputs, given the float32 state before."""


def advance_chunks(advance: Advance, out_T: Tensor, state_SX: Tensor, slots: Slots, chunks: ChunkTable) -> Tensor:
    """Run over the new tokens of N sequences; fill and return ``out_T``.

    Args:
        state_SX: view of all slots in any floating dtype, strided over slots, each slot's state contiguous.
        chunks: the table of these T rows.
    """
    dst = slots.dst_N.tolist()
    for i, source_X in enumerate(_sources(state_SX, slots, chunks.cut_slots)):
        state_X = source_X
        for chunk in range(chunks.first_chunks[i], chunks.first_chunks[i + 1]):
            rows = slice(chunks.starts[chunk], chunks.starts[chunk] + chunks.lengths[chunk])
            state_X, out_T[rows] = advance(state_X, rows)
            _store(state_SX, chunks.cut_slots[chunk], state_X)
        _store(state_SX, dst[i], state_X)
    return out_T


def advance_tokens(advance: Advance, out_N: Tensor, state_SX: Tensor, slots: Slots) -> Tensor:
    """Advance N sequences by one token each; fill and return ``out_N``. Arguments as of ``advance_chunks``."""
    dst = slots.dst_N.tolist()
    for i, source_X in enumerate(_sources(state_SX, slots, ())):
        rows = slice(i, i + 1)
        state_X, out_N[rows] = advance(source_X, rows)
        _store(state_SX, dst[i], state_X)
    return out_N


def chunk_decays(log_decay_MH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decays within one chunk, in float32: exponentials of differences of cumulated logs, at most 1.

    Returns:
        ``decay_HMM``, from the second token to the first, 0 where that is an earlier one; ``from_start_HM1``, from the
        chunk's start to each token; ``to_end_HM1``, from each token to the chunk's end.
    """
    # float64: a difference of large sums must keep the small decays that came after a strong one.
    sum_HM1 = log_decay_MH.t().double().cumsum(-1).unsqueeze(-1)
    decay_HMM = (sum_HM1 - sum_HM1.mT).float().clamp_(MIN_EXPONENT, 0.0).exp_().tril_()
    return decay_HMM, sum_HM1.exp().float(), decay_HMM[:, -1:].mT


def are_overwritten(slots: Slots, cut_slots: Sequence[int] = ()) -> list[bool]:
    """Return for each sequence whether another one, or a cut, writes to the slot that it reads."""
    srcs, dsts = slots.src_N.tolist(), slots.dst_N.tolist()
    writers = Counter(dsts)
    writers.update(cut_slots)
    return [src != NULL_SLOT and writers[src] > (src == dst) for src, dst in zip(srcs, dsts, strict=True)]


def _store(state_SX: Tensor, slot: int, state_X: Tensor) -> None:
    if slot != NULL_SLOT:
        state_SX[slot] = state_X


def _sources(state_SX: Tensor, slots: Slots, cut_slots: Sequence[int]) -> list[Tensor]:
    """Return each sequence's initial state in float32, to be read only: where it lies, or a copy if that is another
    dtype or others will overwrite it."""
    zeros_X = torch.zeros_like(state_SX[0], dtype=torch.float32)
    sources = []
    for source, is_overwritten in zip(slots.src_N.tolist(), are_overwritten(slots, cut_slots), strict=True):
        if source == NULL_SLOT:
            sources.append(zeros_X)
        elif is_overwritten:
            sources.append(state_SX[source].to(torch.float32, copy=True))
        else:
            sources.append(state_SX[source].float())
    return sources
