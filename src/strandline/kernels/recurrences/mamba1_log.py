"""Mamba decode with a log: the state is read at every token, and written once in ``LOG_TOKENS + 1`` of them.

A running sequence is its *committed* state, after the first ``c`` tokens, and a log of the tokens since: of each the
time steps, x times these, and ``B``. To read its state is to advance the committed one over the log; to *fold* is to
write what that gives. Both compute what decoding without a log does, in the same order.

A step either appends its token to the log or folds: log and token together. Which of the two is data
(``LogBatch.num_folded_N``); it must fold where the log is full or the null log, and where the state moves to another
slot.

Invariants: entries past a log's end are not read; a sequence that has no ``dst``, because it has ended, changes
neither state nor log.

Shape suffixes: N sequences, M successive tokens of one, V channels, K dimensions of a channel's state, S slots, J logs,
L entries of a log, R layers.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.operation import operation, triton
from strandline.kernels.recurrences.mamba1 import Mamba1Inputs, decay_rates, read, states_after, time_steps
from strandline.kernels.recurrences.state_recurrence import DecodeLog, LayerTensors
from strandline.specs import LogSpec

LOG_TOKENS: Final = 4
"""A logged token is an eighth of a state with 16 dimensions a channel: more cost as much to read as they save."""


@dataclass(frozen=True, slots=True)
class LogMemory:
    """One layer's logs, in float32; log 0 absorbs writes whose result is discarded.

    Where a function says so, every tensor has one more dimension before these: layers.
    """

    step_JLV: Tensor
    input_JLV: Tensor
    """x times the time steps."""
    B_JLK: Tensor

    def of_layer(self, layer: int) -> "LogMemory":
        """Return one layer's logs of those of several."""
        return LogMemory(self.step_JLV[layer], self.input_JLV[layer], self.B_JLK[layer])

    def tokens(self, log: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first tokens of a log as ``(step_MV, input_MV, B_MK)``."""
        return self.step_JLV[log, :count], self.input_JLV[log, :count], self.B_JLK[log, :count]


@operation(triton("recurrences.mamba1_triton"))
def mamba1_decode_logged(
    inputs: Mamba1Inputs, state_SVK: Tensor, slots: Slots, memory: LogMemory, logs: LogBatch
) -> Tensor:
    """Advance N sequences by one token each; return ``out_NV`` in the dtype of ``x_NV``.

    Where ``src`` is not ``dst``, the log must be empty. No sequence's ``src`` may be another sequence's ``dst``.
    """
    x_NV, z_NV, B_NK, C_NK, dt_NV, D_V, dt_bias_V, A_log_VK = inputs
    rate_VK, step_NV, float_NV = decay_rates(A_log_VK), time_steps(dt_NV, dt_bias_V), x_NV.float()
    new = (step_NV, step_NV * float_NV, B_NK.float())
    out_NV = torch.empty_like(x_NV)
    srcs, dsts = slots.src_N.tolist(), slots.dst_N.tolist()
    where = zip(srcs, dsts, logs.log_N.tolist(), logs.lens, logs.num_folded, strict=True)
    for i, (src, dst, log, num_logged, num_folded) in enumerate(where):
        row = slice(i, i + 1)
        source_VK = torch.zeros_like(state_SVK[0], dtype=torch.float32) if src == NULL_SLOT else state_SVK[src].float()
        logged = memory.tokens(log, num_logged)
        step_MV, input_MV, B_MK = (torch.cat((before, now[row])) for before, now in zip(logged, new, strict=True))
        states_MVK = states_after(source_VK, step_MV, input_MV, B_MK, rate_VK)
        out_NV[row] = read(states_MVK[-1:], float_NV[row], z_NV[row], C_NK[row], D_V)
        if dst != NULL_SLOT and num_folded:
            state_SVK[dst] = states_MVK[-1]
        elif dst != NULL_SLOT:
            for entries, now in zip(memory.tokens(log, num_logged + 1), new, strict=True):
                entries[num_logged] = now[i]
    return out_NV


@operation(triton("recurrences.mamba1_triton"))
def mamba1_fold(
    state_RSVK: Tensor, memory: LogMemory, A_log_RVK: Tensor, slot_N: Tensor, log_N: Tensor, len_N: Tensor
) -> None:
    """Fold N logs into the committed states in N slots, for R layers at once.

    Args:
        memory: with a leading dimension R.
        len_N: tokens in each log, 1 at least.
    """
    for layer, (state_SVK, A_log_VK) in enumerate(zip(state_RSVK, A_log_RVK, strict=True)):
        rate_VK, of_layer = decay_rates(A_log_VK), memory.of_layer(layer)
        for slot, log, num_tokens in zip(slot_N.tolist(), log_N.tolist(), len_N.tolist(), strict=True):
            tokens = of_layer.tokens(log, num_tokens)
            state_SVK[slot] = states_after(state_SVK[slot].float(), *tokens, rate_VK)[-1]


def mamba1_log(A_log_VK: Tensor) -> DecodeLog:
    """Return the log of one layer.

    Args:
        A_log_VK: parameter of the layer, filled before it computes.
    """
    num_channels, state_dim = A_log_VK.shape
    shapes = {"step": (LOG_TOKENS, num_channels), "input": (LOG_TOKENS, num_channels), "B": (LOG_TOKENS, state_dim)}
    operations = (mamba1_decode_logged, mamba1_fold)
    return DecodeLog(LogSpec.of(LOG_TOKENS, shapes), LogMemory, operations, LayerTensors((A_log_VK,)))
