"""Kimi Delta Attention: the gated delta rule with a decay per key channel, in plain torch.

Per head, with the key ``k`` and query ``q`` l2-normalised and ``q`` scaled by ``K ** -0.5``::

    S <- diag(exp(g)) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q
    g = -exp(A_log) softplus(f + dt_bias),  beta = sigmoid(b)

With a lower bound of log decays, ``g = lower_bound sigmoid(exp(A_log) (f + dt_bias))`` instead.

The reference implementation, which also runs on CPUs. Everything is computed in float32.

Invariants: those of ``chunkwise.py``.

Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", section 3.

Shape suffixes: T tokens, N sequences, M tokens of one chunk, H heads, K key channels, V value channels, S slots.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import operation, triton
from strandline.kernels.recurrences.chunkwise import MIN_EXPONENT, MIN_LOG_DECAY, advance_chunks, advance_tokens
from strandline.kernels.recurrences.gdn import normalise


class KimiDeltaInputs(NamedTuple):
    """Some tokens' raw queries, keys and values, what their gates are made of, and the layer's part in these."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    f_THK: Tensor
    b_TH: Tensor
    A_log_H: Tensor
    dt_bias_HK: Tensor
    lower_bound: float | None = None
    """Lower bound of log decays, less than 0; None: unbounded."""


@operation(triton("recurrences.kda_triton", takes_launches=True))
def kda_prefill(inputs: KimiDeltaInputs, state_SHKV: Tensor, slots: Slots, chunks: ChunkTable) -> Tensor:
    """Run the layer over the new tokens of N sequences; return ``out_THV`` in the dtype of ``q_THK``.

    Reads each sequence's initial state from slot ``src``, writes its final state to slot ``dst`` and the state
    after each chunk with a cut to the cut's slot. ``q`` and ``k`` come raw: they are normalised here.

    Args:
        state_SHKV: as ``chunks``, an argument of ``chunkwise.advance_chunks``.
    """
    dtype, v_THV, (q_THK, k_THK) = inputs.q_THK.dtype, inputs.v_THV, normalise(inputs.q_THK, inputs.k_THK)
    log_decay_THK, beta_TH = gates(inputs)

    def advance(state_HKV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        return _advance(state_HKV, q_THK[rows], k_THK[rows], v_THV[rows], log_decay_THK[rows], beta_TH[rows])

    return advance_chunks(advance, torch.empty_like(v_THV, dtype=dtype), state_SHKV, slots, chunks)


@operation(triton("recurrences.kda_triton", takes_launches=True))
def kda_decode(inputs: KimiDeltaInputs, state_SHKV: Tensor, slots: Slots) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``q_NHK``.

    Backends need not support a ``src`` that is another sequence's ``dst``.
    """
    v_NHV, (log_decay_NHK, beta_NH) = inputs.v_THV, gates(inputs)
    decay_NHK1, beta_NH11 = log_decay_NHK.double().exp().float().unsqueeze(-1), beta_NH[..., None, None]
    q_NH1K, k_NH1K = (x.unsqueeze(2) for x in normalise(inputs.q_THK, inputs.k_THK))

    def advance(before_HKV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        i = rows.start
        state_HKV = before_HKV * decay_NHK1[i]
        error_H1V = v_NHV[i].unsqueeze(1) - k_NH1K[i] @ state_HKV
        state_HKV.addcmul_(k_NH1K[i].mT, beta_NH11[i] * error_H1V)
        return state_HKV, (q_NH1K[i] @ state_HKV).transpose(0, 1)

    return advance_tokens(advance, torch.empty_like(v_NHV, dtype=inputs.q_THK.dtype), state_SHKV, slots)


def kda_recurrent_reference(inputs: KimiDeltaInputs, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and final state of one sequence, token by token: far too slow, kept as the baseline."""
    dtype, v_THV, (q_THK, k_THK) = inputs.q_THK.dtype, inputs.v_THV, normalise(inputs.q_THK, inputs.k_THK)
    log_decay_THK, beta_TH = gates(inputs)
    outs = []
    for q, k, v, g, beta in zip(q_THK, k_THK, v_THV.float(), log_decay_THK, beta_TH, strict=True):
        state_HKV = state_HKV * g.exp().unsqueeze(-1)
        error = v - torch.einsum("hkv,hk->hv", state_HKV, k)
        state_HKV = state_HKV + torch.einsum("hk,hv,h->hkv", k, error, beta)
        outs.append(torch.einsum("hkv,hk->hv", state_HKV, q))
    return torch.stack(outs).to(dtype), state_HKV


def gates(inputs: KimiDeltaInputs) -> tuple[Tensor, Tensor]:
    """Return the log decays (at most 0) and the write strength, in float32.

    Computed in float64: torch rounds a float32 ``exp`` differently at a tensor's end, where it does not fill a
    vector, so that the bits of one sequence would depend on the batch around it.
    """
    x_THK, rate_H1 = inputs.f_THK.double() + inputs.dt_bias_HK, inputs.A_log_H.double().exp().unsqueeze(-1)
    if inputs.lower_bound is None:
        decay_rate_THK = F.softplus(x_THK).mul_(rate_H1)
    else:
        decay_rate_THK = x_THK.mul_(rate_H1).sigmoid_().mul_(-inputs.lower_bound)
    return decay_rate_THK.clamp_max_(-MIN_LOG_DECAY).neg_().float(), inputs.b_TH.double().sigmoid_().float()


def _advance(
    state_HKV: Tensor, q_MHK: Tensor, k_MHK: Tensor, v_MHV: Tensor, log_decay_MHK: Tensor, beta_MH: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the state after one chunk, and the chunk's ``out_MHV`` in float32.

    The decay between two tokens is computed for each pair: a product of two factors would overflow.
    """
    q_HMK, k_HMK, v_HMV = (x.transpose(0, 1) for x in (q_MHK, k_MHK, v_MHV))
    beta_HM1 = beta_MH.t().unsqueeze(-1)
    sum_HMK = log_decay_MHK.transpose(0, 1).double().cumsum(1)
    from_start_HMK = sum_HMK.exp().float()
    between_HMMK = (sum_HMK.unsqueeze(2) - sum_HMK.unsqueeze(1)).float().clamp_(MIN_EXPONENT, 0.0).exp_()
    to_end_HMK = between_HMMK[:, -1]
    decayed_HMMK = between_HMMK * k_HMK.unsqueeze(1)

    error_HMV = beta_HM1 * (v_HMV - (from_start_HMK * k_HMK) @ state_HKV)
    # What is on and above the system's diagonal is not read.
    system_HMM = beta_HM1 * (decayed_HMMK * k_HMK.unsqueeze(2)).sum(-1)
    written_HMV = torch.linalg.solve_triangular(system_HMM, error_HMV, upper=False, unitriangular=True)
    attend_HMM = (decayed_HMMK * q_HMK.unsqueeze(2)).sum(-1).tril_()
    out_HMV = torch.baddbmm((from_start_HMK * q_HMK) @ state_HKV, attend_HMM, written_HMV)
    state_HKV = torch.baddbmm(from_start_HMK[:, -1].unsqueeze(-1) * state_HKV, (to_end_HMK * k_HMK).mT, written_HMV)
    return state_HKV, out_HMV.transpose(0, 1)
