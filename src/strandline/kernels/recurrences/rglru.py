"""The real-gated linear recurrent unit (RG-LRU), in plain torch.

Per channel::

    S <- a S + sqrt(1 - a^2) sigmoid(i) x;  out = S
    log a = -8 softplus(rate) sigmoid(r)

The first token of a text is not scaled by ``sqrt(1 - a^2)``.

The reference implementation, which also runs on CPUs. States are float32. A chunk is walked through token by token, so
that how tokens are spread over chunks and steps changes no bit.

Invariants: those of ``chunkwise.py``.

Source: De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention", section 2.4.

Shape suffixes: T tokens, N sequences, M successive tokens of one, V channels, S slots.
"""

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import operation, triton
from strandline.kernels.recurrences.chunkwise import advance_chunks, advance_tokens

DECAY_SCALE: Final = 8.0


class GatedUnitInputs(NamedTuple):
    """Some tokens' inputs, gates and whether they begin a text, and the layer's part in the decays."""

    x_TV: Tensor
    i_TV: Tensor
    r_TV: Tensor
    first_T1: Tensor
    rate_V: Tensor


@operation(triton("recurrences.rglru_triton", takes_launches=True))
def rglru_prefill(inputs: GatedUnitInputs, state_SV: Tensor, slots: Slots, chunks: ChunkTable) -> Tensor:
    """Run the layer over the new tokens of N sequences; return ``out_TV`` in the dtype of ``x_TV``.

    Reads each sequence's initial state from slot ``src``, writes its final state to slot ``dst`` and the state
    after each chunk with a cut to the cut's slot.

    Args:
        i_TV: gates of the inputs, raw; ``r_TV`` those of the decays.
        first_T1: 1 for the first token of a text, else 0.
        state_SV: as ``chunks``, an argument of ``chunkwise.advance_chunks``.
    """
    decay_TV, written_TV = gates(inputs)

    def advance(state_V: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        states_MV = written_TV[rows].clone()
        for after_V, decay_V in zip(states_MV, decay_TV[rows], strict=True):
            state_V = after_V.addcmul_(decay_V, state_V)
        return states_MV[-1], states_MV

    return advance_chunks(advance, torch.empty_like(inputs.x_TV), state_SV, slots, chunks)


@operation(triton("recurrences.rglru_triton"))
def rglru_decode(inputs: GatedUnitInputs, state_SV: Tensor, slots: Slots) -> Tensor:
    """Advance N sequences by one token each; return ``out_NV`` in the dtype of ``x_NV``.

    Backends need not support a ``src`` that is another sequence's ``dst``.
    """
    decay_NV, written_NV = gates(inputs)

    def advance(state_V: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        state_MV = torch.addcmul(written_NV[rows], decay_NV[rows], state_V)
        return state_MV[0], state_MV

    return advance_tokens(advance, torch.empty_like(inputs.x_TV), state_SV, slots)


def rglru_recurrent_reference(inputs: GatedUnitInputs, state_V: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and final state of one sequence, token by token: far too slow, kept as the baseline."""
    x_TV, i_TV, r_TV, first_T1, rate_V = inputs
    log_decay_TV = -DECAY_SCALE * F.softplus(rate_V) * r_TV.float().sigmoid()
    scale_TV = torch.where(first_T1 > 0.5, 1.0, (1 - (2 * log_decay_TV).exp()).sqrt())
    outs = []
    for x, i, log_decay, scale in zip(x_TV.float(), i_TV.float(), log_decay_TV, scale_TV, strict=True):
        state_V = log_decay.exp() * state_V + scale * i.sigmoid() * x
        outs.append(state_V)
    return torch.stack(outs).to(x_TV.dtype), state_V


def gates(inputs: GatedUnitInputs) -> tuple[Tensor, Tensor]:
    """Return the decays and what tokens write, in float32.

    Computed in float64: torch rounds a float32 ``exp`` differently at a tensor's end, where it does not fill a
    vector, so that the bits of one sequence would depend on the batch around it.
    """
    x_TV, i_TV, r_TV, first_T1, rate_V = inputs
    log_decay_TV = r_TV.double().sigmoid_().mul_(F.softplus(rate_V.double())).mul_(-DECAY_SCALE)
    scale_TV = torch.expm1(2 * log_decay_TV).neg_().sqrt_().masked_fill_(first_T1 > 0.5, 1.0)
    return log_decay_TV.exp_().float(), scale_TV.mul_(i_TV.double().sigmoid_()).mul_(x_TV).float()
