"""Gated DeltaNet decode with a log: the state is read at every token, and written once in ``LOG_TOKENS`` of them.

A running sequence is its *committed* state, after the first ``c`` tokens, and a log of the tokens since: of token
``i`` the key ``k_i``, the value ``d_i`` that the delta rule writes, and the sum ``g_i`` of log decays since ``c``. Its
state after token ``n`` is ``exp(g_n) S_c + sum_i exp(g_n - g_i) k_i d_i``; what a token reads of it comes from ``S_c``
and from the log. To *fold* is to form that sum, in ``dst``, and to empty the log.

Invariants: what a log holds is finite, past its end too (its places are zeroed when it is emptied); a sequence that has
no ``dst``, because it has ended, changes neither state nor log.

Shape suffixes: N sequences, X two rows per token (key, query), G key heads, H value heads (a multiple of G), K key
channels, V value channels, S slots, J logs, L places of a log.
"""

from typing import Final

import torch
from torch import Tensor

from strandline.ids import NULL_LOG, NULL_SLOT
from strandline.kernels.batch import LogBatch, LogMemory
from strandline.kernels.gdn import MIN_EXPONENT, gates, key_query

LOG_TOKENS: Final = 8
"""More make writes rarer, and each read of the log longer."""


def gdn_decode_logged(
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
    memory: LogMemory,
    logs: LogBatch,
) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``q_NGK``.

    A log that is full, or empty, is folded first, from slot ``src`` into slot ``dst``; where it is neither, the
    committed state lies in ``src``, and stays there. No sequence reads a slot that another one writes.
    """
    num_sequences, num_heads, value_dim = v_NHV.shape
    log_decay_NH, beta_NH = gates(a_NH, b_NH, A_log_H, dt_bias_H)
    raw_NGXK, factor_NGX1 = key_query(q_NGK, k_NGK)
    key_query_NGXK = raw_NGXK.mul_(factor_NGX1)
    key_query_NHXK = key_query_NGXK.repeat_interleave(num_heads // k_NGK.shape[1], dim=1)
    log_N, place_N = logs.log_N.masked_fill(dst_N == NULL_SLOT, NULL_LOG), logs.place_N
    sum_NH = log_decay_NH.double() + _last_sums(memory, logs)

    read_NHXV = v_NHV.new_zeros(num_sequences, num_heads, 2, value_dim, dtype=torch.float32)
    slots = zip(src_N.tolist(), dst_N.tolist(), logs.log_N.tolist(), logs.lens, logs.places, strict=True)
    for i, (src, dst, log, length, place) in enumerate(slots):
        state_HKV = state_SHKV[src] if src != NULL_SLOT else None
        if place == 0:
            target_HKV = state_SHKV[dst] if dst != NULL_SLOT else torch.empty_like(state_SHKV[0])
            _fold(state_HKV, target_HKV, memory, log, length)
            state_HKV = target_HKV
        if state_HKV is not None:
            torch.bmm(key_query_NHXK[i], state_HKV, out=read_NHXV[i])
    if 0 in logs.places:
        memory.empty(log_N[place_N == 0])
    read_NHXV *= sum_NH.exp().float().view(num_sequences, num_heads, 1, 1)
    if any(logs.places):
        _read_logs(read_NHXV, key_query_NGXK, sum_NH, memory, logs)

    delta_NHV = (v_NHV - read_NHXV[:, :, 0]) * beta_NH.unsqueeze(-1)
    overlap_NH1 = torch.linalg.vecdot(key_query_NHXK[:, :, 0], key_query_NHXK[:, :, 1]).unsqueeze(-1)
    memory.key_JGLK[log_N, :, place_N] = key_query_NGXK[:, :, 0]
    memory.value_JHLV[log_N, :, place_N] = delta_NHV
    memory.sum_JHL[log_N, :, place_N] = sum_NH
    return torch.addcmul(read_NHXV[:, :, 1], overlap_NH1, delta_NHV).to(q_NGK.dtype)


def gdn_fold(state_SHKV: Tensor, slot: int, memory: LogMemory, log: int, num_tokens: int) -> None:
    """Fold the first ``num_tokens`` tokens of a log into the committed state in a slot. The log stays as it is."""
    _fold(state_SHKV[slot], state_SHKV[slot], memory, log, num_tokens)


def _fold(source_HKV: Tensor | None, target_HKV: Tensor, memory: LogMemory, log: int, num_tokens: int) -> None:
    """Write to the target the state after the first ``num_tokens`` of a log; a source of None is zeros."""
    if not num_tokens:
        if source_HKV is None:
            target_HKV.zero_()
        elif source_HKV.data_ptr() != target_HKV.data_ptr():
            target_HKV.copy_(source_HKV)
        return
    sum_HL = memory.sum_JHL[log, :, :num_tokens]
    last_H1 = sum_HL[:, -1:]
    weight_HL1 = (last_H1 - sum_HL).exp().float().unsqueeze(-1)
    if source_HKV is None:
        target_HKV.zero_()
    else:
        torch.mul(source_HKV, last_H1.exp().float().unsqueeze(-1), out=target_HKV)
    key_GLK = memory.key_JGLK[log, :, :num_tokens]
    value_HLV = memory.value_JHLV[log, :, :num_tokens] * weight_HL1
    key_HLK = key_GLK.repeat_interleave(len(value_HLV) // len(key_GLK), dim=0)
    target_HKV.baddbmm_(key_HLK.transpose(1, 2), value_HLV)


def _last_sums(memory: LogMemory, logs: LogBatch) -> Tensor | float:
    """Return the sum of log decays since the committed state of every sequence, ``[N, H]``, once folded."""
    if not any(logs.places):
        return 0.0
    last_N = logs.place_N - 1
    return memory.sum_JHL[logs.log_N, :, last_N.clamp_min(0)].masked_fill_(last_N.unsqueeze(-1) < 0, 0)


def _read_logs(read_NHXV: Tensor, key_query_NGXK: Tensor, sum_NH: Tensor, memory: LogMemory, logs: LogBatch) -> None:
    """Add what keys and queries read of the logs to what they read of the committed states."""
    _, num_heads, _, value_dim = read_NHXV.shape
    key_NGLK, value_NHLV, sum_NHL = (x[logs.rows] for x in (memory.key_JGLK, memory.value_JHLV, memory.sum_JHL))
    exponent_NHL = (sum_NH.unsqueeze(-1) - sum_NHL).clamp_(MIN_EXPONENT, 0.0)
    weight_NHL = exponent_NHL.float().exp_().masked_fill_(logs.is_free_NL.unsqueeze(1), 0)
    score_NGXL = torch.matmul(key_query_NGXK, key_NGLK.transpose(-1, -2))
    heads_per_key = num_heads // score_NGXL.shape[1]
    score_NHXL = score_NGXL.repeat_interleave(heads_per_key, dim=1) * weight_NHL.unsqueeze(2)
    read_NHXV.view(-1, 2, value_dim).baddbmm_(score_NHXL.flatten(0, 1), value_NHLV.flatten(0, 1))
