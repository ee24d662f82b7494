"""Lightning attention: linear attention with one fixed decay per head, in plain torch.

Per head::

    S <- exp(log_decay) S + k v^T;  out = S^T q

The reference implementation, which also runs on CPUs. Everything is computed in float32.

Invariants: those of ``chunkwise.py``.

Source: Qin et al., "Lightning Attention-2", section 3.2; MiniMax, "MiniMax-01", section 2.2.

Shape suffixes: T tokens, N sequences, M tokens of one chunk, H heads, K key channels, V value channels, S slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import operation, triton
from strandline.kernels.recurrences.chunkwise import advance_chunks, advance_tokens, chunk_decays


class LightningInputs(NamedTuple):
    """Some tokens' queries, keys and values, and the layer's log decays."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    log_decay_H: Tensor


@operation(triton("recurrences.lightning_triton", takes_launches=True))
def lightning_prefill(inputs: LightningInputs, state_SHKV: Tensor, slots: Slots, chunks: ChunkTable) -> Tensor:
    """Run the layer over the new tokens of N sequences; return ``out_THV`` in the dtype of ``q_THK``.

    Reads each sequence's initial state from slot ``src``, writes its final state to slot ``dst`` and the state
    after each chunk with a cut to the cut's slot.

    Args:
        log_decay_H: float32, at most 0.
        state_SHKV: as ``chunks``, an argument of ``chunkwise.advance_chunks``.
    """
    q_THK, k_THK, v_THV, log_decay_H = inputs

    def advance(state_HKV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        q_HMK, k_HMK, v_HMV = (x[rows].transpose(0, 1).float() for x in (q_THK, k_THK, v_THV))
        decay_HMM, from_start_HM1, to_end_HM1 = chunk_decays(log_decay_H.expand(q_HMK.shape[1], -1))
        attend_HMM = decay_HMM * (q_HMK @ k_HMK.mT)
        out_HMV = torch.baddbmm(from_start_HM1 * (q_HMK @ state_HKV), attend_HMM, v_HMV)
        state_HKV = torch.baddbmm(from_start_HM1[:, -1:] * state_HKV, k_HMK.mT, to_end_HM1 * v_HMV)
        return state_HKV, out_HMV.transpose(0, 1)

    return advance_chunks(advance, torch.empty_like(v_THV), state_SHKV, slots, chunks)


@operation(triton("recurrences.lightning_triton", takes_launches=True))
def lightning_decode(inputs: LightningInputs, state_SHKV: Tensor, slots: Slots) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``q_NHK``.

    Backends need not support a ``src`` that is another sequence's ``dst``.
    """
    q_NHK, k_NHK, v_NHV, log_decay_H = inputs
    decay_H11 = log_decay_H.double().exp().float()[:, None, None]

    def advance(state_HKV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        q_H1K, k_H1K, v_H1V = (x[rows.start].float().unsqueeze(1) for x in (q_NHK, k_NHK, v_NHV))
        state_HKV = torch.addcmul(decay_H11 * state_HKV, k_H1K.mT, v_H1V)
        return state_HKV, (q_H1K @ state_HKV).transpose(0, 1)

    return advance_tokens(advance, torch.empty_like(v_NHV), state_SHKV, slots)


def lightning_recurrent_reference(inputs: LightningInputs, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and final state of one sequence, token by token: far too slow, kept as the baseline."""
    q_THK, k_THK, v_THV, log_decay_H = inputs
    outs = []
    for q, k, v in zip(q_THK.float(), k_THK.float(), v_THV.float(), strict=True):
        state_HKV = state_HKV * log_decay_H.exp()[:, None, None] + torch.einsum("hk,hv->hkv", k, v)
        outs.append(torch.einsum("hkv,hk->hv", state_HKV, q))
    return torch.stack(outs).to(q_THK.dtype), state_HKV
