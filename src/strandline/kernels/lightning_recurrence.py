"""Lightning attention as a :class:`strandline.kernels.recurrence.Recurrence`.

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
from strandline.kernels.lightning import lightning_decode, lightning_prefill
from strandline.specs import LogSpec, TensorSpec


class LightningInputs(NamedTuple):
    """Some tokens' queries, keys and values, and the layer's log decays."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    log_decay_H: Tensor


@dataclass(frozen=True, slots=True)
class LightningKernels:
    """The functions that advance states."""

    prefill: Callable[..., Tensor] = lightning_prefill.reference
    decode: Callable[..., Tensor] = lightning_decode.reference


@dataclass(frozen=True)
class Lightning:
    """Lightning attention of one size; it keeps no log. Its memory is ``state_SHKV``."""

    num_heads: int
    key_dim: int
    value_dim: int
    state_dtype: str
    kernels: LightningKernels = LightningKernels()

    operations: ClassVar = (lightning_prefill, lightning_decode)

    def with_kernels(self, kernels: Kernels) -> "Lightning":
        """Return the recurrence as these kernels compute it."""
        return replace(self, kernels=LightningKernels(*(kernels[operation] for operation in self.operations)))

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
        self, inputs: LightningInputs, memory: Tensor, src_N: Tensor, dst_N: Tensor, chunks: ChunkTable
    ) -> Tensor:
        """Run over the new tokens of N sequences; return ``out_THV``."""
        return self.kernels.prefill(*inputs, memory, src_N, dst_N, chunks)

    def decode(
        self, inputs: LightningInputs, memory: Tensor, src_N: Tensor, dst_N: Tensor, log: LogBatch | None
    ) -> Tensor:
        """Advance N sequences by one token each; return ``out_THV``."""
        del log
        return self.kernels.decode(*inputs, memory, src_N, dst_N)

    def fold(self, memory: Tensor, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
        """Do nothing: there is no log."""
