"""Mamba-2 in Triton, by the kernels of ``head_decay_triton.py`` and ``mamba2_log_triton.py``.

The last dimension of every tensor must be contiguous, and each slot's ``[H, K, V]``. No sequence's ``src`` may be the
``dst`` of another one, nor a cut's slot.

Shape suffixes: as in ``mamba2.py``.
"""
# mypy: ignore-errors

from torch import Tensor

from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import Launches
from strandline.kernels.recurrences.gdn_log import LogMemory
from strandline.kernels.recurrences.head_decay_triton import Gates, HeadDecayInputs, decode, prefill
from strandline.kernels.recurrences.mamba2 import Mamba2Inputs
from strandline.kernels.recurrences.mamba2_log_triton import decode_logged


def mamba2_prefill(
    inputs: Mamba2Inputs,
    state_SHKV: Tensor,
    slots: Slots,
    chunks: ChunkTable,
    *,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """As :func:`strandline.kernels.recurrences.mamba2.mamba2_prefill`."""
    return prefill(_inputs(inputs), state_SHKV, slots, chunks, launches)


def mamba2_decode(
    inputs: Mamba2Inputs, state_SHKV: Tensor, slots: Slots, *, launches: Launches = Launches.MEASURED
) -> Tensor:
    """As :func:`strandline.kernels.recurrences.mamba2.mamba2_decode`."""
    return decode(_inputs(inputs), state_SHKV, slots, launches)


def mamba2_decode_logged(
    inputs: Mamba2Inputs, state_SHKV: Tensor, slots: Slots, memory: LogMemory, logs: LogBatch
) -> Tensor:
    """As :func:`strandline.kernels.recurrences.mamba2_log.mamba2_decode_logged`; logs are contiguous."""
    return decode_logged(_inputs(inputs), state_SHKV, slots, memory, logs)


def _inputs(inputs: Mamba2Inputs) -> HeadDecayInputs:
    gates = Gates(inputs.A_log_H, inputs.dt_TH, inputs.dt_bias_H, inputs.dt_limit, inputs.dt_factor)
    return HeadDecayInputs(inputs.C_TGK, inputs.B_TGK, inputs.x_THV, gates, inputs.D_H)
