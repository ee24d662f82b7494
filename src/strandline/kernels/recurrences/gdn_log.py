"""Gated DeltaNet decode with a log: the state is read at every token, and written once in ``LOG_TOKENS + 1`` of them.

A running sequence consists of its *committed* state, after the first ``c`` tokens, and a log of later tokens, which
holds for token ``i`` the key ``k_i``, the value ``d_i`` that the delta rule writes, and the log decay ``g_i``. The
state after token ``n`` is ``exp(sum_j g_j) S_c + sum_i exp(sum_{j > i} g_j) k_i d_i``; a token reads it from ``S_c``
and the log. To *fold* is to write that sum to ``dst``, which empties the log.

A step either appends its token to the log or folds log and token together, so that no program of a kernel reads data
that another one writes. ``LogBatch.num_folded_N`` selects which; a sequence must fold if its log is full or the null
log, or if its state moves to another slot.

Invariants: a sequence without a ``dst``, because it has ended, changes neither state nor log. What this module reads of
a log at once has zeros past its end; no other version reads there, nor do folds.

Shape suffixes: N sequences, X two rows per token (key, query), G key heads, H value heads (a multiple of G), K key
channels, V value channels, S slots, J logs, L entries of a log, R layers.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from strandline.ids import NULL_LOG, NULL_SLOT
from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.operation import Operation, numba, operation, triton
from strandline.kernels.recurrences.chunkwise import FLOAT32_STATE, MIN_EXPONENT
from strandline.kernels.recurrences.gdn import GatedDeltaInputs, gates, normalise
from strandline.kernels.recurrences.state_recurrence import DecodeLog
from strandline.specs import LogSpec

LOG_TOKENS: Final = 8
"""Tokens in a log. A longer log makes writes of the state rarer and reads of the log longer."""


@dataclass(frozen=True, slots=True)
class LogMemory:
    """One layer's logs, in float32; log 0 takes writes whose result is discarded.

    For functions over several layers, every tensor has a leading dimension: layers.
    """

    key_JGLK: Tensor
    value_JHLV: Tensor
    decay_JHL: Tensor
    """Log decays."""

    def empty(self, log_N: Tensor) -> None:
        """Zero some logs."""
        for tensor in (self.key_JGLK, self.value_JHLV, self.decay_JHL):
            tensor.index_fill_(0, log_N, 0)

    def of_layer(self, layer: int) -> "LogMemory":
        """Return one layer's logs out of several layers'."""
        return LogMemory(self.key_JGLK[layer], self.value_JHLV[layer], self.decay_JHL[layer])


@operation(triton("recurrences.gdn_decode_triton"), numba("recurrences.gdn_decode_numba", memory=FLOAT32_STATE))
def gdn_decode_logged(
    inputs: GatedDeltaInputs, state_SHKV: Tensor, slots: Slots, memory: LogMemory, logs: LogBatch
) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``q_NGK``.

    Where ``src`` is not ``dst``, the log must be empty. No sequence's ``src`` may be another sequence's ``dst``.
    """
    q_NGK, k_NGK, v_NHV, *_ = inputs
    num_sequences, num_heads, value_dim = v_NHV.shape
    log_decay_NH, beta_NH = gates(inputs)
    key_query_NGXK = torch.stack(normalise(q_NGK, k_NGK)[::-1], dim=2)
    key_query_NHXK = key_query_NGXK.repeat_interleave(num_heads // k_NGK.shape[1], dim=1)
    if 0 in logs.lens:
        memory.empty(logs.log_N[logs.len_N == 0])

    read_NHXV = v_NHV.new_zeros(num_sequences, num_heads, 2, value_dim, dtype=torch.float32)
    srcs, dst_N = slots.src_N.tolist(), slots.dst_N
    for i, src in enumerate(srcs):
        if src != NULL_SLOT:
            torch.bmm(key_query_NHXK[i], state_SHKV[src].float(), out=read_NHXV[i])
    weight_NHL = carried_NH = log_decay_NH.exp()
    if any(logs.lens):
        decay_NHL = memory.decay_JHL[logs.rows]
        weight_NHL = remaining_weights(decay_NHL, log_decay_NH.unsqueeze(-1))
        carried_NH = (log_decay_NH + decay_NHL.sum(-1)).exp()
    read_NHXV *= carried_NH.view(num_sequences, num_heads, 1, 1)
    if any(logs.lens):
        _read_logs(read_NHXV, key_query_NGXK, weight_NHL, memory, logs)

    delta_NHV = (v_NHV - read_NHXV[:, :, 0]) * beta_NH.unsqueeze(-1)
    overlap_NH1 = torch.linalg.vecdot(key_query_NHXK[:, :, 0], key_query_NHXK[:, :, 1]).unsqueeze(-1)
    log_N, index_N = logs.log_N.masked_fill(dst_N == NULL_SLOT, NULL_LOG), logs.len_N
    if any(logs.num_folded):
        for i, (src, dst, num_tokens) in enumerate(zip(srcs, dst_N.tolist(), logs.lens, strict=True)):
            if logs.num_folded[i] and dst != NULL_SLOT:
                source_HKV = state_SHKV[src] if src != NULL_SLOT else torch.zeros_like(state_SHKV[dst])
                state_HKV = source_HKV * carried_NH[i].view(-1, 1, 1)
                if num_tokens:
                    add_logged(state_HKV, memory, int(logs.log_N[i]), weight_NHL[i], num_tokens)
                state_HKV.baddbmm_(key_query_NHXK[i, :, :1].transpose(1, 2), delta_NHV[i].unsqueeze(1))
                state_SHKV[dst] = state_HKV
        is_folded_N = logs.num_folded_N > 0
        log_N, index_N = log_N.masked_fill_(is_folded_N, NULL_LOG), index_N.masked_fill(is_folded_N, 0)
    memory.key_JGLK[log_N, :, index_N] = key_query_NGXK[:, :, 0]
    memory.value_JHLV[log_N, :, index_N] = delta_NHV
    memory.decay_JHL[log_N, :, index_N] = log_decay_NH
    return torch.addcmul(read_NHXV[:, :, 1], overlap_NH1, delta_NHV).to(q_NGK.dtype)


@operation(triton("recurrences.gdn_log_triton"), numba("recurrences.gdn_decode_numba", memory=FLOAT32_STATE))
def gdn_fold(state_RSHKV: Tensor, memory: LogMemory, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
    """Fold N logs into the committed states in N slots, for R layers at once.

    Args:
        memory: with a leading dimension R.
        len_N: tokens in each log, 1 at least.
    """
    for slot, log, num_tokens in zip(slot_N.tolist(), log_N.tolist(), len_N.tolist(), strict=True):
        for layer, state_SHKV in enumerate(state_RSHKV):
            decay_HL = memory.decay_JHL[layer, log, :, :num_tokens]
            state_HKV = state_SHKV[slot] * decay_HL.sum(-1).exp().view(-1, 1, 1)
            add_logged(state_HKV, memory.of_layer(layer), log, remaining_weights(decay_HL), num_tokens)
            state_SHKV[slot] = state_HKV


def gdn_log(
    num_key_heads: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    decode: Operation[..., Tensor] = gdn_decode_logged,
) -> DecodeLog:
    """Return the log of layers of a size.

    Args:
        decode: the operation that appends to the log and reads it.
    """
    shapes = {
        "key": (num_key_heads, LOG_TOKENS, key_dim),
        "value": (num_heads, LOG_TOKENS, value_dim),
        "decay": (num_heads, LOG_TOKENS),
    }
    return DecodeLog(LogSpec.of(LOG_TOKENS, shapes), LogMemory, (decode, gdn_fold))


def add_logged(state_HKV: Tensor, memory: LogMemory, log: int, weight_HL: Tensor, num_tokens: int) -> None:
    """Add the first ``num_tokens`` of a log to a float32 state."""
    key_GLK = memory.key_JGLK[log, :, :num_tokens]
    value_HLV = memory.value_JHLV[log, :, :num_tokens] * weight_HL[:, :num_tokens].unsqueeze(-1)
    key_HLK = key_GLK.repeat_interleave(len(value_HLV) // len(key_GLK), dim=0)
    state_HKV.baddbmm_(key_HLK.transpose(1, 2), value_HLV)


def remaining_weights(decay_XHL: Tensor, log_decay_XH1: Tensor | None = None) -> Tensor:
    """Return the remaining weight of each logged token's write, for a token with ``log_decay_XH1`` or for the state.

    Decays are added, never subtracted: a weak one beside a strong one would be lost.
    """
    num_entries = decay_XHL.shape[-1]
    is_later_LL = decay_XHL.new_ones(num_entries, num_entries).tril_(-1)
    exponent_XHL = decay_XHL @ is_later_LL
    if log_decay_XH1 is not None:
        exponent_XHL += log_decay_XH1
    return exponent_XHL.clamp_min_(MIN_EXPONENT).exp_()


def _read_logs(
    read_NHXV: Tensor, key_query_NGXK: Tensor, weight_NHL: Tensor, memory: LogMemory, logs: LogBatch
) -> None:
    """Add the logs' contribution to the results that keys and queries read from the committed states."""
    _, num_heads, _, value_dim = read_NHXV.shape
    key_NGLK, value_NHLV = memory.key_JGLK[logs.rows], memory.value_JHLV[logs.rows]
    score_NGXL = torch.matmul(key_query_NGXK, key_NGLK.transpose(-1, -2))
    heads_per_key = num_heads // score_NGXL.shape[1]
    score_NHXL = score_NGXL.repeat_interleave(heads_per_key, dim=1) * weight_NHL.unsqueeze(2)
    read_NHXV.view(-1, 2, value_dim).baddbmm_(score_NHXL.flatten(0, 1), value_NHLV.flatten(0, 1))
