"""Attention and a recurrent layer side by side: both read the same hidden state, and what they make is added up.

Shape suffixes: T tokens of the step, E hidden size.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.expert_choices import Summand, WeighedSum
from strandline.kernels.recurrences.recurrence import Recurrence
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.parts.step import Step
from strandline.models.layers.recurrences.mamba2 import Mamba2Layer
from strandline.specs import LayerSpec


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors of the inputs and outputs of both parts."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    recurrent_in: float = 1.0
    recurrent_out: float = 1.0


class ParallelMixer(nn.Module):
    """The sum of attention and a recurrent layer. Its memory is that of both."""

    def __init__(self, attention: Attention, recurrent: Mamba2Layer, multipliers: Multipliers) -> None:
        super().__init__()
        self.attention, self.recurrent, self.multipliers = attention, recurrent, multipliers

    @property
    def spec(self) -> LayerSpec:
        recurrent = self.recurrent.spec
        return LayerSpec(self.attention.spec.streams, recurrent.states, recurrent.log, recurrent.draft_log)

    @property
    def recurrence(self) -> Recurrence[Any, Any]:
        return self.recurrent.recurrence

    def bind(self, memory: LayerMemory) -> tuple[Any, Any]:
        """Return the layer's memory as ``forward`` takes it."""
        return self.attention.bind(memory), self.recurrent.bind(memory)

    def rerun(self, batch: StepBatch, memory: tuple[Any, Any]) -> None:
        """Advance the states over logged tokens alone."""
        self.recurrent.rerun(batch, memory[1])

    def forward(self, hidden_TE: Tensor, step: Step, memory: tuple[Any, Any]) -> Summand:
        factors, (attention_memory, recurrent_memory) = self.multipliers, memory
        recurrent_TE = self.recurrent(_multiplied(hidden_TE, factors.recurrent_in), step, recurrent_memory)
        attended_TE = self.attention(_multiplied(hidden_TE, factors.attention_in), step, attention_memory)
        return WeighedSum(recurrent_TE, factors.recurrent_out, attended_TE, factors.attention_out)


def _multiplied(hidden_TE: Tensor, factor: float) -> Tensor:
    return hidden_TE if factor == 1.0 else hidden_TE * factor
