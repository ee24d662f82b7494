"""The real-gated linear recurrent unit as a :class:`strandline.kernels.recurrence.Recurrence`.

Shape suffixes: T tokens, N sequences, V channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from torch import Tensor

from strandline.kernels.batch import LogBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.rglru import rglru_decode, rglru_prefill
from strandline.specs import LogSpec, TensorSpec


class GatedUnitInputs(NamedTuple):
    """Some tokens' inputs, gates and whether they begin a text, and the layer's part in the decays."""

    x_TV: Tensor
    i_TV: Tensor
    r_TV: Tensor
    first_T1: Tensor
    rate_V: Tensor


@dataclass(frozen=True, slots=True)
class GatedUnitKernels:
    """The functions that advance states."""

    prefill: Callable[..., Tensor] = rglru_prefill.reference
    decode: Callable[..., Tensor] = rglru_decode.reference


@dataclass(frozen=True)
class GatedUnit:
    """The recurrent unit of one size; it keeps no log. Its memory is ``state_SV``."""

    num_channels: int
    state_dtype: str
    kernels: GatedUnitKernels = GatedUnitKernels()

    operations: ClassVar = (rglru_prefill, rglru_decode)

    def with_kernels(self, kernels: Kernels) -> "GatedUnit":
        """Return the recurrence as these kernels compute it."""
        return replace(self, kernels=GatedUnitKernels(*(kernels[operation] for operation in self.operations)))

    @cached_property
    def states(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("state", (self.num_channels,), self.state_dtype, is_recurrent=True),)

    @property
    def log(self) -> LogSpec | None:
        return None

    def bind(self, states: Mapping[str, Tensor], log: Mapping[str, Tensor] | None) -> Tensor:
        """Return the layer's memory as the kernels take it."""
        del log
        return states["state"]

    def prefill(
        self, inputs: GatedUnitInputs, memory: Tensor, src_N: Tensor, dst_N: Tensor, chunks: ChunkTable
    ) -> Tensor:
        """Run over the new tokens of N sequences; return ``out_TV``."""
        return self.kernels.prefill(*inputs, memory, src_N, dst_N, chunks)

    def decode(
        self, inputs: GatedUnitInputs, memory: Tensor, src_N: Tensor, dst_N: Tensor, log: LogBatch | None
    ) -> Tensor:
        """Advance N sequences by one token each; return ``out_TV``."""
        del log
        return self.kernels.decode(*inputs, memory, src_N, dst_N)

    def fold(self, memory: Tensor, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
        """Do nothing: there is no log."""
