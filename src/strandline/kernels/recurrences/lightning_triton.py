"""Lightning attention in Triton, by the kernels of ``head_decay_triton.py``.

The last dimension of every tensor must be contiguous, and each slot's ``[H, K, V]``. No sequence's ``src`` may be the
``dst`` of another one, nor a cut's slot.

Shape suffixes: as in ``lightning.py``.
"""
# mypy: ignore-errors

from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import Launches
from strandline.kernels.recurrences.head_decay_triton import Gates, HeadDecayInputs, decode, prefill
from strandline.kernels.recurrences.lightning import LightningInputs


def lightning_prefill(
    inputs: LightningInputs,
    state_SHKV: Tensor,
    slots: Slots,
    chunks: ChunkTable,
    *,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """As :func:`strandline.kernels.recurrences.lightning.lightning_prefill`."""
    return prefill(_inputs(inputs), state_SHKV, slots, chunks, launches)


def lightning_decode(
    inputs: LightningInputs, state_SHKV: Tensor, slots: Slots, *, launches: Launches = Launches.MEASURED
) -> Tensor:
    """As :func:`strandline.kernels.recurrences.lightning.lightning_decode`."""
    return decode(_inputs(inputs), state_SHKV, slots, launches)


def _inputs(inputs: LightningInputs) -> HeadDecayInputs:
    q_THK, k_THK, v_THV, log_decay_H = inputs
    return HeadDecayInputs(q_THK, k_THK, v_THV, Gates(log_decay_H))
