"""Mamba-2 decode with a log: the state is read at every token, and written once in ``LOG_TOKENS + 1`` of them.

The log is that of ``gdn_log.py``: Mamba-2's state after a token, too, is the decayed one before it plus a key times a
written value. Here the key is the token's input projection ``B``, and the value is ``dt x``. What a step does with a
log, and its invariants, are stated there; ``gdn_fold`` folds.

Shape suffixes: as in ``mamba2.py``, and J logs, L entries of a log, M logged tokens of one sequence.
"""

import torch
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.operation import numba, operation, triton
from strandline.kernels.recurrences.chunkwise import FLOAT32_STATE
from strandline.kernels.recurrences.gdn_log import LogMemory, add_logged, gdn_log, remaining_weights
from strandline.kernels.recurrences.mamba2 import Mamba2Inputs, time_steps
from strandline.kernels.recurrences.state_recurrence import DecodeLog


@operation(triton("recurrences.mamba2_triton"), numba("recurrences.mamba2_decode_numba", memory=FLOAT32_STATE))
def mamba2_decode_logged(
    inputs: Mamba2Inputs, state_SHKV: Tensor, slots: Slots, memory: LogMemory, logs: LogBatch
) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``x_NHV``.

    Where ``src`` is not ``dst``, the log must be empty. No sequence's ``src`` may be another sequence's ``dst``.
    """
    x_NHV, B_NGK, C_NGK, D_H = inputs.x_THV.float(), inputs.B_TGK.float(), inputs.C_TGK.float(), inputs.D_H
    step_NH1, log_decay_NH = time_steps(inputs)
    written_NHV, heads_per_group = step_NH1 * x_NHV, x_NHV.shape[1] // B_NGK.shape[1]
    out_NHV = torch.empty_like(inputs.x_THV)
    srcs, dsts = slots.src_N.tolist(), slots.dst_N.tolist()
    where = zip(srcs, dsts, logs.log_N.tolist(), logs.lens, logs.num_folded, strict=True)
    for i, (src, dst, log, num_logged, num_folded) in enumerate(where):
        state_HKV = torch.zeros_like(state_SHKV[0], dtype=torch.float32) if src == NULL_SLOT else state_SHKV[src]
        decay_HM = memory.decay_JHL[log, :, :num_logged]
        log_decay_H1 = log_decay_NH[i].unsqueeze(-1)
        state_HKV = state_HKV * (decay_HM.sum(-1, keepdim=True) + log_decay_H1).exp().unsqueeze(-1)
        add_logged(state_HKV, memory, log, remaining_weights(decay_HM, log_decay_H1), num_logged)
        B_HK1, C_H1K = (x[i].repeat_interleave(heads_per_group, 0).unsqueeze(d) for x, d in ((B_NGK, 2), (C_NGK, 1)))
        state_HKV.baddbmm_(B_HK1, written_NHV[i].unsqueeze(1))
        out_NHV[i] = (C_H1K @ state_HKV).squeeze(1).addcmul_(x_NHV[i], D_H.float().unsqueeze(1))
        if dst != NULL_SLOT and num_folded:
            state_SHKV[dst] = state_HKV
        elif dst != NULL_SLOT:
            memory.key_JGLK[log, :, num_logged] = B_NGK[i]
            memory.value_JHLV[log, :, num_logged] = written_NHV[i]
            memory.decay_JHL[log, :, num_logged] = log_decay_NH[i]
    return out_NHV


def mamba2_log(num_groups: int, num_heads: int, state_dim: int, head_dim: int) -> DecodeLog:
    """Return the log of layers of a size."""
    return gdn_log(num_groups, num_heads, state_dim, head_dim, mamba2_decode_logged)
