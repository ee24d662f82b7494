"""Mamba-2 as a :class:`strandline.kernels.recurrence.Recurrence`.

Shape suffixes: T tokens, N sequences, G groups, H heads, K channels of the state, V channels of a head, S slots.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from torch import Tensor

from strandline.kernels.batch import LogBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.mamba2 import mamba2_decode, mamba2_prefill
from strandline.specs import LogSpec, TensorSpec


class Mamba2Inputs(NamedTuple):
    """Some tokens' values, input and output projections and raw time steps, and the layer's part in these."""

    x_THV: Tensor
    B_TGK: Tensor
    C_TGK: Tensor
    dt_TH: Tensor
    A_log_H: Tensor
    D_H: Tensor
    dt_bias_H: Tensor


@dataclass(frozen=True, slots=True)
class Mamba2Kernels:
    """The functions that advance states."""

    prefill: Callable[..., Tensor] = mamba2_prefill.reference
    decode: Callable[..., Tensor] = mamba2_decode.reference


@dataclass(frozen=True)
class Mamba2:
    """The state space model of one size; it keeps no log. Its memory is ``state_SHKV``."""

    num_heads: int
    state_dim: int
    head_dim: int
    dt_limit: tuple[float, float]
    state_dtype: str
    kernels: Mamba2Kernels = Mamba2Kernels()

    operations: ClassVar = (mamba2_prefill, mamba2_decode)

    def with_kernels(self, kernels: Kernels) -> "Mamba2":
        """Return the recurrence as these kernels compute it."""
        return replace(self, kernels=Mamba2Kernels(*(kernels[operation] for operation in self.operations)))

    @cached_property
    def states(self) -> tuple[TensorSpec, ...]:
        shape = (self.num_heads, self.state_dim, self.head_dim)
        return (TensorSpec("state", shape, self.state_dtype, is_recurrent=True),)

    @property
    def log(self) -> LogSpec | None:
        return None

    def bind(self, states: Mapping[str, Tensor], log: Mapping[str, Tensor] | None) -> Tensor:
        """Return the layer's memory as the kernels take it."""
        del log
        return states["state"]

    def prefill(self, inputs: Mamba2Inputs, memory: Tensor, src_N: Tensor, dst_N: Tensor, chunks: ChunkTable) -> Tensor:
        """Run over the new tokens of N sequences; return ``out_THV``."""
        return self.kernels.prefill(*inputs, self.dt_limit, memory, src_N, dst_N, chunks)

    def decode(
        self, inputs: Mamba2Inputs, memory: Tensor, src_N: Tensor, dst_N: Tensor, log: LogBatch | None
    ) -> Tensor:
        """Advance N sequences by one token each; return ``out_THV``."""
        del log
        return self.kernels.decode(*inputs, self.dt_limit, memory, src_N, dst_N)

    def fold(self, memory: Tensor, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
        """Do nothing: there is no log."""
