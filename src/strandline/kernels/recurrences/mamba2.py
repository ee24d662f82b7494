"""Mamba-2: a state space model with one decay per head, in plain torch.

Per head, with the input projection ``B`` and the output projection ``C`` of the head's group::

    S <- exp(-exp(A_log) dt) S + B (dt x)^T;  out = S^T C + D x
    dt = clamp(softplus(dt_factor dt + dt_bias), *dt_limit)

The reference implementation, which also runs on CPUs without Numba. Everything is computed in float32.

Invariants: those of ``chunkwise.py``.

Source: Dao and Gu, "Transformers are SSMs", section 6 (the block decomposition of the state space dual form).

Shape suffixes: T tokens, N sequences, M tokens of one chunk, G groups, H heads (a multiple of G), K channels of the
state, V channels of a head, S slots.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import numba, operation, triton
from strandline.kernels.recurrences.chunkwise import (
    FLOAT32_STATE,
    MIN_LOG_DECAY,
    advance_chunks,
    advance_tokens,
    chunk_decays,
)


class Mamba2Inputs(NamedTuple):
    """Some tokens' values, input and output projections and raw time steps, and the layer's part in these."""

    x_THV: Tensor
    B_TGK: Tensor
    C_TGK: Tensor
    dt_TH: Tensor
    A_log_H: Tensor
    D_H: Tensor
    dt_bias_H: Tensor
    dt_limit: tuple[float, float] = (0.0, torch.inf)
    """The least and the largest time step."""
    dt_factor: float = 1.0


@operation(
    triton("recurrences.mamba2_triton", takes_launches=True),
    numba("recurrences.mamba2_prefill_numba", memory=FLOAT32_STATE),
)
def mamba2_prefill(inputs: Mamba2Inputs, state_SHKV: Tensor, slots: Slots, chunks: ChunkTable) -> Tensor:
    """Run the layer over the new tokens of N sequences; return ``out_THV`` in the dtype of ``x_THV``.

    Reads each sequence's initial state from slot ``src``, writes its final state to slot ``dst`` and the state
    after each chunk with a cut to the cut's slot.

    Args:
        dt_TH: time steps, raw.
        state_SHKV: as ``chunks``, an argument of ``chunkwise.advance_chunks``.
    """
    x_THV, B_TGK, C_TGK, D_H = inputs.x_THV, inputs.B_TGK, inputs.C_TGK, inputs.D_H
    step_TH1, log_decay_TH = time_steps(inputs)

    def advance(state_HKV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        x_MHV = x_THV[rows].float()
        state_HKV, out_MHV = _advance(
            state_HKV, step_TH1[rows] * x_MHV, B_TGK[rows].float(), C_TGK[rows].float(), log_decay_TH[rows]
        )
        return state_HKV, out_MHV.addcmul_(x_MHV, D_H.float().unsqueeze(1))

    return advance_chunks(advance, torch.empty_like(x_THV), state_SHKV, slots, chunks)


@operation(
    triton("recurrences.mamba2_triton", takes_launches=True),
    numba("recurrences.mamba2_decode_numba", memory=FLOAT32_STATE),
)
def mamba2_decode(inputs: Mamba2Inputs, state_SHKV: Tensor, slots: Slots) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``x_NHV``.

    Backends need not support a ``src`` that is another sequence's ``dst``.
    """
    x_NHV, B_NGK, C_NGK, D_H = inputs.x_THV, inputs.B_TGK, inputs.C_TGK, inputs.D_H
    step_NH1, log_decay_NH = time_steps(inputs)
    decay_NH11, heads_per_group = log_decay_NH.exp()[..., None, None], x_NHV.shape[1] // B_NGK.shape[1]
    B_NHK1, C_NH1K = (x.float().repeat_interleave(heads_per_group, 1).unsqueeze(d) for x, d in ((B_NGK, 3), (C_NGK, 2)))

    def advance(state_HKV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        i = rows.start
        x_HV = x_NHV[i].float()
        state_HKV = torch.addcmul(decay_NH11[i] * state_HKV, B_NHK1[i], (step_NH1[i] * x_HV).unsqueeze(1))
        out_HV = (C_NH1K[i] @ state_HKV).squeeze(1)
        return state_HKV, out_HV.addcmul_(x_HV, D_H.float().unsqueeze(1))

    return advance_tokens(advance, torch.empty_like(x_NHV), state_SHKV, slots)


def mamba2_recurrent_reference(inputs: Mamba2Inputs, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and final state of one sequence, token by token: far too slow, kept as the baseline."""
    x_THV, B_TGK, C_TGK, D_H = inputs.x_THV, inputs.B_TGK, inputs.C_TGK, inputs.D_H
    heads_per_group = x_THV.shape[1] // B_TGK.shape[1]
    B_THK, C_THK = (x.float().repeat_interleave(heads_per_group, 1) for x in (B_TGK, C_TGK))
    step_TH1, log_decay_TH = time_steps(inputs)
    outs = []
    for x, B, C, step, log_decay in zip(x_THV.float(), B_THK, C_THK, step_TH1, log_decay_TH, strict=True):
        state_HKV = state_HKV * log_decay.exp()[:, None, None] + torch.einsum("hk,hv->hkv", B, step * x)
        outs.append(torch.einsum("hkv,hk->hv", state_HKV, C) + D_H[:, None] * x)
    return torch.stack(outs).to(x_THV.dtype), state_HKV


def time_steps(inputs: Mamba2Inputs) -> tuple[Tensor, Tensor]:
    """Return the time steps ``step_TH1`` and the log decays ``log_decay_TH`` (at most 0), in float32.

    Computed in float64: torch rounds a float32 ``exp`` differently at a tensor's end, where it does not fill a
    vector, so that the bits of one sequence would depend on the batch around it.
    """
    step_TH = F.softplus(inputs.dt_TH.double() * inputs.dt_factor + inputs.dt_bias_H).clamp_(*inputs.dt_limit)
    log_decay_TH = (step_TH * inputs.A_log_H.double().exp()).clamp_max_(-MIN_LOG_DECAY).neg_()
    return step_TH.float().unsqueeze(-1), log_decay_TH.float()


def _advance(
    state_HKV: Tensor, x_MHV: Tensor, B_MGK: Tensor, C_MGK: Tensor, log_decay_MH: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the state after one chunk, and what the chunk's tokens read of it, given ``x`` times the time steps."""
    heads_per_group = x_MHV.shape[1] // B_MGK.shape[1]
    B_HMK, C_HMK = (x.transpose(0, 1).repeat_interleave(heads_per_group, 0) for x in (B_MGK, C_MGK))
    decay_HMM, from_start_HM1, to_end_HM1 = chunk_decays(log_decay_MH)
    x_HMV = x_MHV.transpose(0, 1)
    attend_HMM = decay_HMM * (C_HMK @ B_HMK.mT)
    out_HMV = torch.baddbmm(from_start_HM1 * (C_HMK @ state_HKV), attend_HMM, x_HMV)
    state_HKV = torch.baddbmm(from_start_HM1[:, -1:] * state_HKV, B_HMK.mT, to_end_HM1 * x_HMV)
    return state_HKV, out_HMV.transpose(0, 1)
