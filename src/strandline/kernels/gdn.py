"""Gated DeltaNet: the recurrent layer of Qwen3-Next and Qwen3.5, in plain torch.

Per value head, with the key ``k`` and query ``q`` l2-normalised and ``q`` scaled by ``K ** -0.5``::

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q
    g = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)

This module is the definition of right and the path that serves on a CPU without Numba. Everything is computed in
float32.

Invariants: the null slot reads as zeros, and its memory is neither read nor written (a null ``dst`` drops the
state); a slot is written only as some sequence's ``dst`` or as a cut; every source is read as it was before
the call. Decays are exponentials of differences of cumulated logs, masked before ``exp``: none exceeds 1.

On a CPU, states are read and written in place, sequence after sequence: a step of decoding takes 0.1, 0.3, 1.0 and
5.9 ms for 1, 8, 32 and 128 sequences (8 heads of 128 x 128; two cores of an EPYC 9005, torch 2.13), where gathering
32 states into a batch and reading that took 2.7 times as long as reading them in place.

Source: Yang et al., "Gated Delta Networks", section 3.3 (the chunkwise form with the UT transform).

Shape suffixes: T tokens, N sequences, C chunks of a span, L tokens of a padded chunk, M tokens of one chunk,
X two rows per token (key, query), G key heads, H value heads (a multiple of G), R value heads per key head,
K key channels, V value channels, S slots.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable
from strandline.kernels.norm import l2_norm
from strandline.kernels.platform import has_twins

L2_NORM_EPS = 1e-6

MIN_LOG_DECAY = -1e6
"""Stands for minus infinity: ``exp`` of it is 0, and differences of sums of it are numbers."""

MIN_EXPONENT = -80.0
"""Between two tokens of a chunk, less decay than this: no float32 sum shows it, and ``exp`` of it would be a subnormal
number, which takes a CPU ten times as long."""

SPAN_TOKENS = 256
"""Tokens of the chunks whose matrices are held at a time: few enough to stay in cache, however long the
prefill, and for the allocator to keep the scratch instead of asking the system for fresh pages."""

PADDED_TOKENS = (16, CHUNK_TOKENS)
"""Chunks are padded to the smallest of these that holds them. It depends on nothing but the chunk's own length,
so that the bits of one sequence do not depend on the batch around it."""

DECODE_GROUP = 16
"""Sequences whose states are read, then written, together: few enough to be written while still in cache."""


@has_twins(triton="gdn_prefill_triton", numba="gdn_prefill_numba")
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
    states = _open_states(state_SHKV, src_N.tolist(), dst_N.tolist(), chunks.cut_slots)
    log_decay_TH, beta_TH = gates(a_TH, b_TH, A_log_H, dt_bias_H)
    state_of_chunk = [
        state
        for state, first, end in zip(states, chunks.first_chunks, chunks.first_chunks[1:], strict=False)
        for _ in range(first, end)
    ]
    for first, end, padded_tokens in _spans(chunks.lengths):
        span = _prepare_span(q_TGK, k_TGK, log_decay_TH, beta_TH, chunks, first, end, padded_tokens)
        for chunk in range(first, end):
            rows = slice(chunks.starts[chunk], chunks.starts[chunk] + chunks.lengths[chunk])
            state = state_of_chunk[chunk]
            out_THV[rows] = _advance(state, span, chunk - first, v_THV[rows]).transpose(0, 1)
            if chunks.cut_slots[chunk] != NULL_SLOT:
                state_SHKV[chunks.cut_slots[chunk]].copy_(state.target_HKV)
    return out_THV


@has_twins(triton="gdn_decode_triton", numba="gdn_decode_numba")
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

    Slots as in :func:`gdn_prefill`.
    """
    num_heads = v_NHV.shape[1]
    states = _open_states(state_SHKV, src_N.tolist(), dst_N.tolist(), ())
    log_decay_NH, beta_NH = gates(a_NH, b_NH, A_log_H, dt_bias_H)
    decay_NH1 = log_decay_NH.exp().unsqueeze(-1)
    raw_NGXK, factor_NGX1 = key_query(q_NGK, k_NGK)
    key_query_NHXK = (raw_NGXK * factor_NGX1).repeat_interleave(num_heads // k_NGK.shape[1], dim=1)
    read_NHXV = v_NHV.new_zeros(*v_NHV.shape[:2], 2, v_NHV.shape[2], dtype=torch.float32)
    key_NHK1 = key_query_NHXK[:, :, 0].unsqueeze(-1)
    overlap_NH1 = torch.linalg.vecdot(key_query_NHXK[:, :, 0], key_query_NHXK[:, :, 1]).unsqueeze(-1)
    out_NHV = torch.empty(v_NHV.shape, dtype=q_NGK.dtype, device=v_NHV.device)
    for first in range(0, len(states), DECODE_GROUP):
        group = slice(first, first + DECODE_GROUP)
        for i, state in enumerate(states[group], first):
            if state.source_HKV is not None:
                torch.bmm(key_query_NHXK[i], state.source_HKV, out=read_NHXV[i])
        read_NHXV[group] *= decay_NH1[group].unsqueeze(2)
        delta_NHV = (v_NHV[group] - read_NHXV[group, :, 0]) * beta_NH[group].unsqueeze(-1)
        out_NHV[group] = torch.addcmul(read_NHXV[group, :, 1], overlap_NH1[group], delta_NHV)
        for i, (state, delta_HV) in enumerate(zip(states[group], delta_NHV, strict=True), first):
            decayed = _decay(state, decay_NH1[i].unsqueeze(-1))
            decayed.addcmul_(key_NHK1[i], delta_HV.unsqueeze(1))
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
    """Return outputs and final state of one sequence, token by token: far too slow; kept as the definition of right."""
    heads_per_key = v_THV.shape[1] // k_TGK.shape[1]
    q_THK = l2_norm(q_TGK, L2_NORM_EPS).repeat_interleave(heads_per_key, 1) * q_TGK.shape[-1] ** -0.5
    k_THK = l2_norm(k_TGK, L2_NORM_EPS).repeat_interleave(heads_per_key, 1)
    log_decay_TH, beta_TH = gates(a_TH, b_TH, A_log_H, dt_bias_H)
    outs = []
    for q, k, v, g, beta in zip(q_THK, k_THK, v_THV.float(), log_decay_TH, beta_TH, strict=True):
        state_HKV = state_HKV * g.exp()[:, None, None]
        error = v - torch.einsum("hkv,hk->hv", state_HKV, k)
        state_HKV = state_HKV + torch.einsum("hk,hv,h->hkv", k, error, beta)
        outs.append(torch.einsum("hkv,hk->hv", state_HKV, q))
    return torch.stack(outs).to(q_TGK.dtype), state_HKV


@dataclass(slots=True)
class _State:
    """Where one sequence's state is read next, and where it is written."""

    source_HKV: Tensor | None
    """None reads as zeros."""
    target_HKV: Tensor


@dataclass(frozen=True, slots=True)
class _Span:
    """What the recurrence needs of a run of chunks, as far as it does not depend on the state."""

    key_query_CGYK: Tensor
    """Y = 2 L rows: key and query of each token in turn, so that the first M tokens are one block."""
    solve_CHLL: Tensor
    """``(I + A)^-1 diag(beta)``: from prediction errors to the values that are written."""
    attend_CHLL: Tensor
    decay_from_start_CHL1: Tensor
    decay_to_end_CHL1: Tensor
    decay_CH11: Tensor


def _open_states(state_SHKV: Tensor, src: Sequence[int], dst: Sequence[int], cut_slots: Sequence[int]) -> list[_State]:
    """Pair each sequence's source with its target; copy only sources that somebody else will overwrite."""
    writers = Counter(dst)
    writers.update(cut_slots)
    states = []
    for source_slot, target_slot in zip(src, dst, strict=True):
        source = state_SHKV[source_slot] if source_slot != NULL_SLOT else None
        if source is not None and writers[source_slot] > (source_slot == target_slot):
            source = source.clone()
        target = state_SHKV[target_slot] if target_slot != NULL_SLOT else torch.empty_like(state_SHKV[0])
        states.append(_State(source, target))
    return states


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(first, end, padded tokens)`` of runs of chunks that are padded alike and prepared together."""
    first = 0
    for padded_tokens, run in groupby(lengths, lambda length: min(p for p in PADDED_TOKENS if length <= p)):
        run_end = first + sum(1 for _ in run)
        while first < run_end:
            end = min(first + SPAN_TOKENS // padded_tokens, run_end)
            yield first, end, padded_tokens
            first = end


def gates(a_TH: Tensor, b_TH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay (at most 0) and the write strength, in float32.

    Computed in float64: torch rounds a float32 ``exp`` differently at a tensor's end, where it does not fill a
    vector, so that the bits of one sequence would depend on the batch around it.
    """
    decay_rate_TH = F.softplus(a_TH.double() + dt_bias_H).mul_(A_log_H.double().exp())
    return decay_rate_TH.clamp_max_(-MIN_LOG_DECAY).neg_().float(), b_TH.double().sigmoid().float()


def key_query(q_TGK: Tensor, k_TGK: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and query of each token, ``[T, G, 2, K]``, and the factors that normalise (and scale) them."""
    raw_TGXK = torch.stack((k_TGK, q_TGK), dim=2).float()
    factor_TGX1 = torch.linalg.vector_norm(raw_TGXK, dim=-1, keepdim=True).square_().add_(L2_NORM_EPS).rsqrt_()
    factor_TGX1.select(2, 1).mul_(q_TGK.shape[-1] ** -0.5)
    return raw_TGXK, factor_TGX1


def _prepare_span(
    q_TGK: Tensor,
    k_TGK: Tensor,
    log_decay_TH: Tensor,
    beta_TH: Tensor,
    chunks: ChunkTable,
    first: int,
    end: int,
    padded_tokens: int,
) -> _Span:
    """Compute the matrices of chunks ``[first, end)``, all chunks and heads at once."""
    rows_CL, valid_CL1 = _padded_rows(chunks, first, end, padded_tokens)
    rows_X = rows_CL.flatten()
    num_chunks, length = rows_CL.shape
    num_key_heads, key_dim = k_TGK.shape[1:]

    raw, factor = key_query(q_TGK.index_select(0, rows_X), k_TGK.index_select(0, rows_X))
    key_query_CGLXK = raw.new_empty(num_chunks, num_key_heads, length, 2, key_dim)
    raw_CLGXK, factor_CLGX1 = (x.view(num_chunks, length, *x.shape[1:]) for x in (raw, factor))
    torch.mul(raw_CLGXK.transpose(1, 2), factor_CLGX1.transpose(1, 2), out=key_query_CGLXK)
    key_query_CGYK = key_query_CGLXK.flatten(2, 3)
    # Past the end of a chunk nothing decays and nothing is written, whatever the keys and values there.
    log_decay_CHL = (log_decay_TH[rows_CL] * valid_CL1).transpose(1, 2)
    beta_CHL = (beta_TH[rows_CL] * valid_CL1).transpose(1, 2)

    # float64: a difference of large sums must keep the small decays that came after a strong one.
    sum_CHL = log_decay_CHL.double().cumsum(-1)
    difference_CHLL = sum_CHL.unsqueeze(-1) - sum_CHL.unsqueeze(-2)
    decay_CHLL = difference_CHLL.float().clamp_(MIN_EXPONENT, 0.0).exp_().tril_()
    sum_CHL1 = sum_CHL.unsqueeze(-1)

    products = torch.matmul(key_query_CGYK, key_query_CGYK[:, :, 0::2].transpose(-1, -2))
    decay_CGRLL = decay_CHLL.view(num_chunks, num_key_heads, -1, length, length)
    attend_CGRLL = decay_CGRLL * products[:, :, None, 1::2]
    system_CGRLL = decay_CGRLL * products[:, :, None, 0::2]
    system_CHLL = system_CGRLL.flatten(1, 2).mul_(beta_CHL.unsqueeze(-1))
    # What is on and above the system's diagonal is not read.
    beta_CHLL = beta_CHL.diag_embed()
    return _Span(
        key_query_CGYK,
        torch.linalg.solve_triangular(system_CHLL, beta_CHLL, upper=False, unitriangular=True),
        attend_CGRLL.flatten(1, 2),
        sum_CHL1.exp().float(),
        (sum_CHL1[:, :, -1:] - sum_CHL1).exp().float(),
        sum_CHL1[:, :, -1:].exp().float(),
    )


def _padded_rows(chunks: ChunkTable, first: int, end: int, padded_tokens: int) -> tuple[Tensor, Tensor]:
    """Return row indices ``[C, L]`` (past a chunk's end: its last row) and which of them are real, ``[C, L, 1]``."""
    starts_C1 = chunks.starts_C[first:end].unsqueeze(-1)
    lengths_C1 = chunks.lengths_C[first:end].unsqueeze(-1)
    offset_L = torch.arange(padded_tokens, device=starts_C1.device)
    return starts_C1 + torch.minimum(offset_L, lengths_C1 - 1), (offset_L < lengths_C1).unsqueeze(-1)


def _advance(state: _State, span: _Span, chunk: int, v_MHV: Tensor) -> Tensor:
    """Run one chunk: move the sequence's state over it and return ``out_HMV`` in float32."""
    num_tokens, num_heads, _ = v_MHV.shape
    key_query_GYK = span.key_query_CGYK[chunk, :, : 2 * num_tokens]
    heads_per_key = num_heads // key_query_GYK.shape[0]
    key_query_HYK = key_query_GYK.unsqueeze(1).expand(-1, heads_per_key, -1, -1).flatten(0, 1)
    value_HMV = v_MHV.transpose(0, 1).float()
    solve_HMM = span.solve_CHLL[chunk, :, :num_tokens, :num_tokens]
    attend_HMM = span.attend_CHLL[chunk, :, :num_tokens, :num_tokens]
    if state.source_HKV is None:
        written_HMV = solve_HMM @ value_HMV
        out_HMV = attend_HMM @ written_HMV
    else:
        decay_HM1 = span.decay_from_start_CHL1[chunk, :, :num_tokens]
        read_HYV = torch.bmm(key_query_HYK, state.source_HKV)
        error_HMV = torch.addcmul(value_HMV, decay_HM1, read_HYV[:, 0::2], value=-1)
        written_HMV = torch.bmm(solve_HMM, error_HMV)
        out_HMV = (read_HYV[:, 1::2] * decay_HM1).baddbmm_(attend_HMM, written_HMV)
    written_HMV *= span.decay_to_end_CHL1[chunk, :, :num_tokens]
    _decay(state, span.decay_CH11[chunk]).baddbmm_(key_query_HYK[:, 0::2].transpose(1, 2), written_HMV)
    return out_HMV


def _decay(state: _State, decay_H11: Tensor) -> Tensor:
    """Write the decayed source to the target, which is the source from now on, and return it."""
    if state.source_HKV is None:
        state.target_HKV.zero_()
    else:
        torch.mul(state.source_HKV, decay_H11, out=state.target_HKV)
    state.source_HKV = state.target_HKV
    return state.target_HKV
