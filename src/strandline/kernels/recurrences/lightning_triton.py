"""Lightning attention in Triton, by the kernels of ``head_decay_triton.py``.

The last dimension of every tensor must be contiguous, and each slot's ``[H, K, V]``. No sequence's ``src`` may be the
``dst`` of another one, nor a cut's slot.

Shape suffixes: as in ``lightning.py``.
"""
# mypy: ignore-errors

from torch import Tensor

from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.recurrences.head_decay_triton import (
    MANY,
    Gates,
    choose_decode_launch,
    decode,
    prefill,
    prefill_invariant,
)


def lightning_prefill(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    log_decay_H: Tensor,
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
) -> Tensor:
    """As :func:`strandline.kernels.recurrences.lightning.lightning_prefill`."""
    return prefill(q_THK, k_THK, v_THV, Gates(log_decay_H), None, state_SHKV, src_N, dst_N, chunks)


def lightning_prefill_invariant(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    log_decay_H: Tensor,
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
) -> Tensor:
    """As :func:`lightning_prefill`, with sequences undivided, whatever others there are."""
    return prefill_invariant(q_THK, k_THK, v_THV, Gates(log_decay_H), None, state_SHKV, src_N, dst_N, chunks)


def lightning_decode(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    log_decay_H: Tensor,
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
) -> Tensor:
    """As :func:`strandline.kernels.recurrences.lightning.lightning_decode`."""
    launch = choose_decode_launch(len(src_N))
    return decode(q_NHK, k_NHK, v_NHV, Gates(log_decay_H), None, state_SHKV, src_N, dst_N, launch)


def lightning_decode_invariant(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    log_decay_H: Tensor,
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
) -> Tensor:
    """As :func:`lightning_decode`, with one launch for any number of sequences."""
    return decode(q_NHK, k_NHK, v_NHV, Gates(log_decay_H), None, state_SHKV, src_N, dst_N, MANY)
