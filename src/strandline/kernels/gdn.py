"""Gated DeltaNet: the recurrent layer of Qwen3-Next and Qwen3.5, in plain torch.

Per value head, with the key ``k`` and query ``q`` l2-normalised and ``q`` scaled by ``K ** -0.5``::

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q
    g = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)

The reference implementation, which also runs on CPUs without Numba. Everything is computed in float32.

Invariants: the null slot reads as zeros, and its memory is neither read nor written (a null ``dst`` drops the
state); a slot is written only as some sequence's ``dst`` or as a cut; every source is read as it was before
the call. Decays are exponentials of differences of cumulated logs, masked before ``exp``: none exceeds 1.

Source: Yang et al., "Gated Delta Networks", section 3.3 (the chunkwise form with the UT transform).

Shape suffixes: T tokens, N sequences, M tokens of one chunk, G key heads, H value heads (a multiple of G), K key
channels, V value channels, S slots.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.norm import l2_norm
from strandline.kernels.operation import numba, operation, triton

L2_NORM_EPS = 1e-6

FLOAT32_STATE: Final = {"state": ("float32",)}
"""What Numba kernels support: they read and write a state where it lies."""

MIN_LOG_DECAY = -1e6
"""Stands for minus infinity: ``exp`` of it is 0, and differences of sums of it are numbers."""

MIN_EXPONENT = -80.0
"""Between two tokens of a chunk, less decay than this: no float32 sum shows it, and ``exp`` of it would be a subnormal
number, which takes a CPU ten times as long."""


@operation(
    triton("gdn_prefill_triton", invariant="gdn_prefill_triton"), numba("gdn_prefill_numba", memory=FLOAT32_STATE)
)
def gdn_prefill(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
) -> Tensor:
    """Run the layer over the new tokens of N sequences; return ``out_THV`` in the dtype of ``q_TGK``.

    Reads each sequence's initial state from slot ``src``, writes its final state to slot ``dst`` and the state
    after each chunk with a cut to the cut's slot. ``q`` and ``k`` come raw: they are normalised here.

    Args:
        state_SHKV: float32 view of all slots, strided over slots, each slot's ``[H, K, V]`` contiguous.
        src_N: int64 slots; several sequences may share one.
        dst_N: int64 slots, each distinct or null; may equal ``src_N``.
        chunks: the table of these T rows.
    """
    out_THV = torch.empty(v_THV.shape, dtype=q_TGK.dtype, device=v_THV.device)
    dst = dst_N.tolist()
    sources = _sources(state_SHKV, src_N.tolist(), dst, chunks.cut_slots)
    log_decay_TH, beta_TH = gates(a_TH, b_TH, A_log_H, dt_bias_H)
    q_TGK, k_TGK = normalise(q_TGK, k_TGK)
    for i, source_HKV in enumerate(sources):
        state_HKV = source_HKV
        for chunk in range(chunks.first_chunks[i], chunks.first_chunks[i + 1]):
            rows = slice(chunks.starts[chunk], chunks.starts[chunk] + chunks.lengths[chunk])
            state_HKV, out_THV[rows] = _advance(
                state_HKV, q_TGK[rows], k_TGK[rows], v_THV[rows], log_decay_TH[rows], beta_TH[rows]
            )
            if chunks.cut_slots[chunk] != NULL_SLOT:
                state_SHKV[chunks.cut_slots[chunk]] = state_HKV
        if dst[i] != NULL_SLOT:
            state_SHKV[dst[i]] = state_HKV
    return out_THV


@operation(triton("gdn_decode_triton", invariant="gdn_decode_triton"), numba("gdn_decode_numba", memory=FLOAT32_STATE))
def gdn_decode(
    q_NGK: Tensor,
    k_NGK: Tensor,
    v_NHV: Tensor,
    a_NH: Tensor,
    b_NH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``q_NGK``.

    Slots as in :func:`gdn_prefill`. Backends need not bear a ``src`` that is another sequence's ``dst``.
    """
    out_NHV = torch.empty(v_NHV.shape, dtype=q_NGK.dtype, device=v_NHV.device)
    dst = dst_N.tolist()
    log_decay_NH, beta_NH = gates(a_NH, b_NH, A_log_H, dt_bias_H)
    decay_NH11, beta_NH11 = (x[..., None, None] for x in (log_decay_NH.exp(), beta_NH))
    heads_per_key = v_NHV.shape[1] // k_NGK.shape[1]
    q_NH1K, k_NH1K = (x.repeat_interleave(heads_per_key, 1).unsqueeze(2) for x in normalise(q_NGK, k_NGK))
    for i, source_HKV in enumerate(_sources(state_SHKV, src_N.tolist(), dst, ())):
        state_HKV = source_HKV * decay_NH11[i]
        error_H1V = v_NHV[i].unsqueeze(1) - k_NH1K[i] @ state_HKV
        state_HKV.addcmul_(k_NH1K[i].mT, beta_NH11[i] * error_H1V)
        out_NHV[i] = (q_NH1K[i] @ state_HKV).squeeze(1)
        if dst[i] != NULL_SLOT:
            state_SHKV[dst[i]] = state_HKV
    return out_NHV


def gdn_recurrent_reference(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    state_HKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return outputs and final state of one sequence, token by token: far too slow, kept as the baseline."""
    heads_per_key = v_THV.shape[1] // k_TGK.shape[1]
    q_THK, k_THK = (x.repeat_interleave(heads_per_key, 1) for x in normalise(q_TGK, k_TGK))
    log_decay_TH, beta_TH = gates(a_TH, b_TH, A_log_H, dt_bias_H)
    outs = []
    for q, k, v, g, beta in zip(q_THK, k_THK, v_THV.float(), log_decay_TH, beta_TH, strict=True):
        state_HKV = state_HKV * g.exp()[:, None, None]
        error = v - torch.einsum("hkv,hk->hv", state_HKV, k)
        state_HKV = state_HKV + torch.einsum("hk,hv,h->hkv", k, error, beta)
        outs.append(torch.einsum("hkv,hk->hv", state_HKV, q))
    return torch.stack(outs).to(q_TGK.dtype), state_HKV


def _sources(state_SHKV: Tensor, src: Sequence[int], dst: Sequence[int], cut_slots: Sequence[int]) -> list[Tensor]:
    """Return each sequence's initial state, to be read only: where it lies, or a copy if others will overwrite it."""
    writers = Counter(dst)
    writers.update(cut_slots)
    zeros_HKV = torch.zeros_like(state_SHKV[0])
    sources = []
    for source, target in zip(src, dst, strict=True):
        if source == NULL_SLOT:
            sources.append(zeros_HKV)
        elif writers[source] > (source == target):
            sources.append(state_SHKV[source].clone())
        else:
            sources.append(state_SHKV[source])
    return sources


def gates(a_TH: Tensor, b_TH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay (at most 0) and the write strength, in float32.

    Computed in float64: torch rounds a float32 ``exp`` differently at a tensor's end, where it does not fill a
    vector, so that the bits of one sequence would depend on the batch around it.
    """
    decay_rate_TH = F.softplus(a_TH.double() + dt_bias_H).mul_(A_log_H.double().exp())
    return decay_rate_TH.clamp_max_(-MIN_LOG_DECAY).neg_().float(), b_TH.double().sigmoid().float()


def normalise(q_TGK: Tensor, k_TGK: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries, scaled, and keys as the recurrence takes them, in float32."""
    return l2_norm(q_TGK, L2_NORM_EPS) * q_TGK.shape[-1] ** -0.5, l2_norm(k_TGK, L2_NORM_EPS)


def _advance(
    state_HKV: Tensor, q_MGK: Tensor, k_MGK: Tensor, v_MHV: Tensor, log_decay_MH: Tensor, beta_MH: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the state after one chunk, and the chunk's ``out_MHV`` in float32."""
    heads_per_key = v_MHV.shape[1] // k_MGK.shape[1]
    q_HMK, k_HMK = (x.transpose(0, 1).repeat_interleave(heads_per_key, 0) for x in (q_MGK, k_MGK))
    v_HMV, beta_HM1 = v_MHV.transpose(0, 1), beta_MH.t().unsqueeze(-1)

    # float64: a difference of large sums must keep the small decays that came after a strong one.
    sum_HM1 = log_decay_MH.t().double().cumsum(-1).unsqueeze(-1)
    decay_HMM = (sum_HM1 - sum_HM1.mT).float().clamp_(MIN_EXPONENT, 0.0).exp_().tril_()
    from_start_HM1, to_end_HM1 = sum_HM1.exp().float(), decay_HMM[:, -1:].mT

    error_HMV = beta_HM1 * (v_HMV - from_start_HM1 * (k_HMK @ state_HKV))
    # What is on and above the system's diagonal is not read.
    system_HMM = beta_HM1 * decay_HMM * (k_HMK @ k_HMK.mT)
    written_HMV = torch.linalg.solve_triangular(system_HMM, error_HMV, upper=False, unitriangular=True)
    attend_HMM = decay_HMM * (q_HMK @ k_HMK.mT)
    out_HMV = torch.baddbmm(from_start_HM1 * (q_HMK @ state_HKV), attend_HMM, written_HMV)
    state_HKV = torch.baddbmm(from_start_HM1[:, -1:] * state_HKV, k_HMK.mT, to_end_HM1 * written_HMV)
    return state_HKV, out_HMV.transpose(0, 1)
