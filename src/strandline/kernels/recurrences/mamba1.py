"""Mamba: a selective state space model, with a decay per channel and state, in plain torch.

Per channel, with the input projection ``B`` and the output projection ``C`` of all channels::

    S <- exp(-exp(A_log) dt) * S + (dt x) B;  out = (S C + D x) silu(z)
    dt = softplus(dt + dt_bias)

The reference implementation, which also runs on CPUs. States are float32. Their decays cannot be factored out of a
chunk, as those of a head can: a chunk is walked through token by token, so that how tokens are spread over chunks,
steps and logs changes no bit.

Invariants: those of ``chunkwise.py``.

Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", section 3.2.

Shape suffixes: T tokens, N sequences, M successive tokens of one, V channels, K dimensions of a channel's state,
S slots.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import operation, triton
from strandline.kernels.recurrences.chunkwise import advance_chunks, advance_tokens


class Mamba1Inputs(NamedTuple):
    """Some tokens' values, gates, projections and raw time steps, and the layer's part in these."""

    x_TV: Tensor
    z_TV: Tensor
    B_TK: Tensor
    C_TK: Tensor
    dt_TV: Tensor
    D_V: Tensor
    dt_bias_V: Tensor
    A_log_VK: Tensor


@operation(triton("recurrences.mamba1_prefill_triton", takes_launches=True))
def mamba1_prefill(inputs: Mamba1Inputs, state_SVK: Tensor, slots: Slots, chunks: ChunkTable) -> Tensor:
    """Run the layer over the new tokens of N sequences; return ``out_TV`` in the dtype of ``x_TV``.

    Reads each sequence's initial state from slot ``src``, writes its final state to slot ``dst`` and the state
    after each chunk with a cut to the cut's slot.

    Args:
        z_TV: gate of the output, raw.
        dt_TV: time steps, raw.
        state_SVK: as ``chunks``, an argument of ``chunkwise.advance_chunks``.
    """
    x_TV, z_TV, B_TK, C_TK, dt_TV, D_V, dt_bias_V, A_log_VK = inputs
    step_TV, rate_VK = time_steps(dt_TV, dt_bias_V), decay_rates(A_log_VK)

    def advance(state_VK: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        x_MV = x_TV[rows].float()
        states_MVK = states_after(state_VK, step_TV[rows], step_TV[rows] * x_MV, B_TK[rows].float(), rate_VK)
        return states_MVK[-1], read(states_MVK, x_MV, z_TV[rows], C_TK[rows], D_V)

    return advance_chunks(advance, torch.empty_like(x_TV), state_SVK, slots, chunks)


@operation(triton("recurrences.mamba1_triton", takes_launches=True))
def mamba1_decode(inputs: Mamba1Inputs, state_SVK: Tensor, slots: Slots) -> Tensor:
    """Advance N sequences by one token each; return ``out_NV`` in the dtype of ``x_NV``.

    Backends need not support a ``src`` that is another sequence's ``dst``.
    """
    x_NV, z_NV, B_NK, C_NK, dt_NV, D_V, dt_bias_V, A_log_VK = inputs
    step_NV, rate_VK = time_steps(dt_NV, dt_bias_V), decay_rates(A_log_VK)

    def advance(state_VK: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        x_MV = x_NV[rows].float()
        states_MVK = states_after(state_VK, step_NV[rows], step_NV[rows] * x_MV, B_NK[rows].float(), rate_VK)
        return states_MVK[-1], read(states_MVK, x_MV, z_NV[rows], C_NK[rows], D_V)

    return advance_tokens(advance, torch.empty_like(x_NV), state_SVK, slots)


def mamba1_recurrent_reference(inputs: Mamba1Inputs, state_VK: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and final state of one sequence, token by token: far too slow, kept as the baseline."""
    x_TV, z_TV, B_TK, C_TK, dt_TV, D_V, dt_bias_V, A_log_VK = inputs
    step_TV = F.softplus(dt_TV.float() + dt_bias_V)
    outs = []
    for x_V, z_V, B_K, C_K, step_V in zip(x_TV.float(), z_TV.float(), B_TK.float(), C_TK.float(), step_TV, strict=True):
        decay_VK = torch.exp(-A_log_VK.exp() * step_V.unsqueeze(1))
        state_VK = decay_VK * state_VK + torch.outer(step_V * x_V, B_K)
        outs.append((state_VK @ C_K + D_V * x_V) * F.silu(z_V))
    return torch.stack(outs).to(x_TV.dtype), state_VK


def time_steps(dt_TV: Tensor, dt_bias_V: Tensor) -> Tensor:
    """Return the time steps ``step_TV`` in float32.

    Here and below, functions are computed in float64: torch rounds a float32 ``exp`` differently at a tensor's end,
    where it does not fill a vector, so that the bits of one sequence would depend on the batch around it.
    """
    return F.softplus(dt_TV.double() + dt_bias_V).float()


def decay_rates(A_log_VK: Tensor) -> Tensor:
    """Return what the log decay is of a time step of 1, in float64."""
    return A_log_VK.double().exp_().neg_()


def states_after(state_VK: Tensor, step_MV: Tensor, input_MV: Tensor, B_MK: Tensor, rate_VK: Tensor) -> Tensor:
    """Return the float32 state after each of some successive tokens.

    Args:
        input_MV: x times the time steps.
    """
    decay_MVK = (step_MV.double().unsqueeze(-1) * rate_VK).exp_().float()
    states_MVK = input_MV.unsqueeze(-1) * B_MK.unsqueeze(1)
    for decay_VK, written_VK in zip(decay_MVK, states_MVK, strict=True):
        state_VK = written_VK.addcmul_(decay_VK, state_VK)
    return states_MVK


def read(states_MVK: Tensor, x_MV: Tensor, z_MV: Tensor, C_MK: Tensor, D_V: Tensor) -> Tensor:
    """Return what tokens read of the states after them, gated, in float32."""
    out_MV = states_MVK.mul(C_MK.float().unsqueeze(1)).sum(-1)
    return out_MV.addcmul_(x_MV, D_V.float()).mul_(F.silu(z_MV.double()).float())
