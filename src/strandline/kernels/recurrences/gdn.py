"""Gated DeltaNet: the recurrent layer of Qwen3-Next, Qwen3.5 and OLMo Hybrid, in plain torch.

Per value head, with the key ``k`` and query ``q`` l2-normalised and ``q`` scaled by ``K ** -0.5``::

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q
    g = -exp(A_log) softplus(a + dt_bias),  beta = max_beta sigmoid(b)

The eigenvalues of ``I - beta k k^T`` lie between 0 and 1 where ``max_beta`` is 1, and between -1 and 1 where it is 2.

The reference implementation, which also runs on CPUs without Numba. Everything is computed in float32.

Invariants: those of ``chunkwise.py``.

Source: Yang et al., "Gated Delta Networks", section 3.3 (the chunkwise form with the UT transform); Grazzi et al.,
"Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues".

Shape suffixes: T tokens, N sequences, M tokens of one chunk, G key heads, H value heads (a multiple of G), K key
channels, V value channels, S slots.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.batch import RerunBatch, Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import numba, operation, triton
from strandline.kernels.recurrences.chunkwise import (
    FLOAT32_STATE,
    MIN_LOG_DECAY,
    advance_chunks,
    advance_tokens,
    chunk_decays,
)
from strandline.kernels.recurrences.rerun import of_step
from strandline.kernels.rowwise.norm import l2_norm

L2_NORM_EPS = 1e-6


class GatedDeltaInputs(NamedTuple):
    """Raw queries, keys, values and gate inputs of tokens, and the layer's gate parameters."""

    q_TGK: Tensor
    k_TGK: Tensor
    v_THV: Tensor
    a_TH: Tensor
    b_TH: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor
    max_beta: int = 1
    """Limit of the write strength: 1, or 2 where eigenvalues may be negative."""


@operation(
    triton("recurrences.gdn_prefill_triton", takes_launches=True),
    numba("recurrences.gdn_prefill_numba", memory=FLOAT32_STATE),
)
def gdn_prefill(
    inputs: GatedDeltaInputs,
    state_SHKV: Tensor,
    slots: Slots,
    chunks: ChunkTable,
    rerun: RerunBatch | None = None,
    out_THV: Tensor | None = None,
) -> Tensor:
    """Run the layer over the new tokens of N sequences; return ``out_THV`` in the dtype of ``q_TGK``.

    Reads each sequence's initial state from slot ``src``, writes its final state to slot ``dst`` and the state
    after each chunk with a cut to the cut's slot. ``q`` and ``k`` are not normalised yet.

    Args:
        state_SHKV: as ``chunks``, an argument of ``chunkwise.advance_chunks``.
        rerun: the rows are logged tokens and the step's own, and outputs of the latter are returned, in their order.
        out_THV: contiguous memory for the outputs; None: a new tensor. Not with ``rerun``.
    """
    dtype, v_THV, (q_TGK, k_TGK) = inputs.q_TGK.dtype, inputs.v_THV, normalise(inputs.q_TGK, inputs.k_TGK)
    log_decay_TH, beta_TH = gates(inputs)

    def advance(state_HKV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        return _advance(state_HKV, q_TGK[rows], k_TGK[rows], v_THV[rows], log_decay_TH[rows], beta_TH[rows])

    if out_THV is None:
        out_THV = torch.empty_like(v_THV, dtype=dtype)
    return of_step(rerun, advance_chunks(advance, out_THV, state_SHKV, slots, chunks))


@operation(
    triton("recurrences.gdn_decode_triton", takes_launches=True),
    numba("recurrences.gdn_decode_numba", memory=FLOAT32_STATE),
)
def gdn_decode(inputs: GatedDeltaInputs, state_SHKV: Tensor, slots: Slots) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``q_NGK``.

    Backends need not support a ``src`` that is another sequence's ``dst``.
    """
    v_NHV, (log_decay_NH, beta_NH) = inputs.v_THV, gates(inputs)
    decay_NH11, beta_NH11 = (x[..., None, None] for x in (log_decay_NH.exp(), beta_NH))
    heads_per_key = v_NHV.shape[1] // inputs.k_TGK.shape[1]
    q_NH1K, k_NH1K = (x.repeat_interleave(heads_per_key, 1).unsqueeze(2) for x in normalise(inputs.q_TGK, inputs.k_TGK))

    def advance(before_HKV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        i = rows.start
        state_HKV = before_HKV * decay_NH11[i]
        error_H1V = v_NHV[i].unsqueeze(1) - k_NH1K[i] @ state_HKV
        state_HKV.addcmul_(k_NH1K[i].mT, beta_NH11[i] * error_H1V)
        return state_HKV, (q_NH1K[i] @ state_HKV).transpose(0, 1)

    return advance_tokens(advance, torch.empty_like(v_NHV, dtype=inputs.q_TGK.dtype), state_SHKV, slots)


def gdn_recurrent_reference(inputs: GatedDeltaInputs, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and final state of one sequence, token by token: far too slow, kept as the baseline."""
    heads_per_key = inputs.v_THV.shape[1] // inputs.k_TGK.shape[1]
    q_THK, k_THK = (x.repeat_interleave(heads_per_key, 1) for x in normalise(inputs.q_TGK, inputs.k_TGK))
    log_decay_TH, beta_TH = gates(inputs)
    outs = []
    for q, k, v, g, beta in zip(q_THK, k_THK, inputs.v_THV.float(), log_decay_TH, beta_TH, strict=True):
        state_HKV = state_HKV * g.exp()[:, None, None]
        error = v - torch.einsum("hkv,hk->hv", state_HKV, k)
        state_HKV = state_HKV + torch.einsum("hk,hv,h->hkv", k, error, beta)
        outs.append(torch.einsum("hkv,hk->hv", state_HKV, q))
    return torch.stack(outs).to(inputs.q_TGK.dtype), state_HKV


def gates(inputs: GatedDeltaInputs) -> tuple[Tensor, Tensor]:
    """Return the log decay (at most 0) and the write strength, in float32.

    Computed in float64: torch rounds a float32 ``exp`` differently in the last, partial vector of a tensor, so the bits
    of a sequence would depend on the batch around it.
    """
    decay_rate_TH = F.softplus(inputs.a_TH.double() + inputs.dt_bias_H).mul_(inputs.A_log_H.double().exp())
    beta_TH = inputs.b_TH.double().sigmoid_().mul_(inputs.max_beta)
    return decay_rate_TH.clamp_max_(-MIN_LOG_DECAY).neg_().float(), beta_TH.float()


def normalise(q_TGK: Tensor, k_TGK: Tensor) -> tuple[Tensor, Tensor]:
    """Return l2-normalised, scaled queries and l2-normalised keys, in float32."""
    return l2_norm(q_TGK, L2_NORM_EPS) * q_TGK.shape[-1] ** -0.5, l2_norm(k_TGK, L2_NORM_EPS)


def _advance(
    state_HKV: Tensor, q_MGK: Tensor, k_MGK: Tensor, v_MHV: Tensor, log_decay_MH: Tensor, beta_MH: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the state after one chunk, and the chunk's ``out_MHV`` in float32."""
    heads_per_key = v_MHV.shape[1] // k_MGK.shape[1]
    q_HMK, k_HMK = (x.transpose(0, 1).repeat_interleave(heads_per_key, 0) for x in (q_MGK, k_MGK))
    v_HMV, beta_HM1 = v_MHV.transpose(0, 1), beta_MH.t().unsqueeze(-1)

    decay_HMM, from_start_HM1, to_end_HM1 = chunk_decays(log_decay_MH)

    error_HMV = beta_HM1 * (v_HMV - from_start_HM1 * (k_HMK @ state_HKV))
    # Entries on and above the system's diagonal are not read.
    system_HMM = beta_HM1 * decay_HMM * (k_HMK @ k_HMK.mT)
    written_HMV = torch.linalg.solve_triangular(system_HMM, error_HMV, upper=False, unitriangular=True)
    attend_HMM = decay_HMM * (q_HMK @ k_HMK.mT)
    out_HMV = torch.baddbmm(from_start_HM1 * (q_HMK @ state_HKV), attend_HMM, written_HMV)
    state_HKV = torch.baddbmm(from_start_HM1[:, -1:] * state_HKV, k_HMK.mT, to_end_HM1 * written_HMV)
    return state_HKV, out_HMV.transpose(0, 1)
