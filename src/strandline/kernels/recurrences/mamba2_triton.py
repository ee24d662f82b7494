"""Mamba-2 in Triton, by the kernels of ``head_decay_triton.py``.

The last dimension of every tensor must be contiguous, and each slot's ``[H, K, V]``. No sequence's ``src`` may be the
``dst`` of another one, nor a cut's slot.

Shape suffixes: as in ``mamba2.py``.
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


def mamba2_prefill(
    x_THV: Tensor,
    B_TGK: Tensor,
    C_TGK: Tensor,
    dt_TH: Tensor,
    A_log_H: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    dt_limit: tuple[float, float],
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
) -> Tensor:
    """As :func:`strandline.kernels.recurrences.mamba2.mamba2_prefill`."""
    gates = Gates(A_log_H, dt_TH, dt_bias_H, dt_limit)
    return prefill(C_TGK, B_TGK, x_THV, gates, D_H, state_SHKV, src_N, dst_N, chunks)


def mamba2_prefill_invariant(
    x_THV: Tensor,
    B_TGK: Tensor,
    C_TGK: Tensor,
    dt_TH: Tensor,
    A_log_H: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    dt_limit: tuple[float, float],
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
) -> Tensor:
    """As :func:`mamba2_prefill`, with sequences undivided, whatever others there are."""
    gates = Gates(A_log_H, dt_TH, dt_bias_H, dt_limit)
    return prefill_invariant(C_TGK, B_TGK, x_THV, gates, D_H, state_SHKV, src_N, dst_N, chunks)


def mamba2_decode(
    x_NHV: Tensor,
    B_NGK: Tensor,
    C_NGK: Tensor,
    dt_NH: Tensor,
    A_log_H: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    dt_limit: tuple[float, float],
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
) -> Tensor:
    """As :func:`strandline.kernels.recurrences.mamba2.mamba2_decode`."""
    gates, launch = Gates(A_log_H, dt_NH, dt_bias_H, dt_limit), choose_decode_launch(len(src_N))
    return decode(C_NGK, B_NGK, x_NHV, gates, D_H, state_SHKV, src_N, dst_N, launch)


def mamba2_decode_invariant(
    x_NHV: Tensor,
    B_NGK: Tensor,
    C_NGK: Tensor,
    dt_NH: Tensor,
    A_log_H: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    dt_limit: tuple[float, float],
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
) -> Tensor:
    """As :func:`mamba2_decode`, with one launch for any number of sequences."""
    gates = Gates(A_log_H, dt_NH, dt_bias_H, dt_limit)
    return decode(C_NGK, B_NGK, x_NHV, gates, D_H, state_SHKV, src_N, dst_N, MANY)
