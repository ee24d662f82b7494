"""Kimi Delta Attention as a :class:`strandline.kernels.recurrence.Recurrence`.

Shape suffixes: T tokens, N sequences, H heads, K key channels, V value channels, S slots.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from torch import Tensor

from strandline.kernels.batch import LogBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.kda import kda_decode, kda_prefill
from strandline.specs import LogSpec, TensorSpec


class KimiDeltaInputs(NamedTuple):
    """Some tokens' raw queries, keys and values, what their gates are made of, and the layer's part in these."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    f_THK: Tensor
    b_TH: Tensor
    A_log_H: Tensor
    dt_bias_HK: Tensor


@dataclass(frozen=True, slots=True)
class KimiDeltaKernels:
    """The functions that advance states."""

    prefill: Callable[..., Tensor] = kda_prefill.reference
    decode: Callable[..., Tensor] = kda_decode.reference


@dataclass(frozen=True)
class KimiDelta:
    """The rule of one size; it keeps no log. Its memory is ``state_SHKV``."""

    num_heads: int
    key_dim: int
    value_dim: int
    state_dtype: str
    kernels: KimiDeltaKernels = KimiDeltaKernels()

    operations: ClassVar = (kda_prefill, kda_decode)

    def with_kernels(self, kernels: Kernels) -> "KimiDelta":
        """Return the recurrence as these kernels compute it."""
        return replace(self, kernels=KimiDeltaKernels(*(kernels[operation] for operation in self.operations)))

    @cached_property
    def states(self) -> tuple[TensorSpec, ...]:
        shape = (self.num_heads, self.key_dim, self.value_dim)
        return (TensorSpec("state", shape, self.state_dtype, is_recurrent=True),)

    @property
    def log(self) -> LogSpec | None:
        return None

    def bind(self, states: Mapping[str, Tensor], log: Mapping[str, Tensor] | None) -> Tensor:
        """Return the layer's memory as the kernels take it."""
        del log
        return states["state"]

    def prefill(
        self, inputs: KimiDeltaInputs, memory: Tensor, src_N: Tensor, dst_N: Tensor, chunks: ChunkTable
    ) -> Tensor:
        """Run over the new tokens of N sequences; return ``out_THV``."""
        return self.kernels.prefill(*inputs, memory, src_N, dst_N, chunks)

    def decode(
        self, inputs: KimiDeltaInputs, memory: Tensor, src_N: Tensor, dst_N: Tensor, log: LogBatch | None
    ) -> Tensor:
        """Advance N sequences by one token each; return ``out_THV``."""
        del log
        return self.kernels.decode(*inputs, memory, src_N, dst_N)

    def fold(self, memory: Tensor, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
        """Do nothing: there is no log."""
