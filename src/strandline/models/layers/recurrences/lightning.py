"""Lightning attention: linear attention with fixed decays, normalised over all heads, behind a sigmoid gate.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading.

Source: ``transformers`` (``minimax``).

Shape suffixes: T tokens of the step, E hidden size, H heads, D channels of a head, O heads' channels side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.recurrences.lightning import LightningInputs, lightning_decode, lightning_prefill
from strandline.kernels.recurrences.rerun import DraftLog, draft_log
from strandline.kernels.recurrences.state_recurrence import StateMemory, StateRecurrence
from strandline.kernels.rowwise.activation import sigmoid_gate
from strandline.kernels.rowwise.norm import rms_norm
from strandline.models.layers.parts.projection import FusedProjection, SummedProjection
from strandline.models.layers.parts.recurrent import advance
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, sharded, unused
from strandline.models.layers.parts.wide_norm import rms_norm_over_ranks
from strandline.specs import LayerSpec, TensorSpec

NORM_EPS: Final = 1e-6


@dataclass(frozen=True, slots=True)
class LightningConfig:
    """Sizes of the layer, and where in the model it is."""

    hidden_size: int
    num_heads: int
    head_dim: int
    depth: float
    """Position among the layers, from 0 to 1: the deeper, the slower the decays."""
    block_size: int
    """Block size of the tables that are published beside the weights."""
    state_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class LightningMemory:
    """A layer's share of all slots and logs."""

    recurrent: StateMemory
    draft_log: DraftLog


class LightningAttention(nn.Module):
    """The recurrent layer.

    Args:
        site: the shard divides the heads.
    """

    operations = (rms_norm, sigmoid_gate, lightning_prefill, lightning_decode)
    log_decay_H: Tensor

    def __init__(self, config: LightningConfig, site: Site) -> None:
        super().__init__()
        self.shard, self.num_all_heads = site.shard, config.num_heads
        self.config = config = replace(config, num_heads=site.shard.part_of(config.num_heads, "attention heads"))
        num_heads, head_dim, hidden_size = config.num_heads, config.head_dim, config.hidden_size
        size = num_heads * head_dim
        self.recurrence = StateRecurrence[LightningInputs](
            (lightning_prefill, lightning_decode), (num_heads, head_dim, head_dim), config.state_dtype
        )
        self.in_proj = FusedProjection((3 * size, size), hidden_size, site)
        """Rows: head after head the query, the key and the value; then all heads' output gates."""
        self.norm_O = site.gain(size)
        self.out_proj = SummedProjection(hidden_size, size, site)
        held = slice(site.shard.index * num_heads, (site.shard.index + 1) * num_heads)
        log_decay_H = log_decays(self.num_all_heads, config.depth)[held]
        self.register_buffer("log_decay_H", log_decay_H.to(site.device), persistent=False)

    @property
    def spec(self) -> LayerSpec:
        shape, dtype = (self.config.num_heads, self.config.head_dim), dtype_name(self.norm_O.dtype)
        logged = tuple(TensorSpec(name, shape, dtype) for name in ("query", "key", "value"))
        states = tuple(map(self.shard.divided, self.recurrence.states))
        return LayerSpec(states=states, log=self.recurrence.log, draft_log=logged)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._rms_norm, self._sigmoid_gate = rms_norm_over_ranks(kernels), kernels[sigmoid_gate]
        self.recurrence = self.recurrence.with_kernels(kernels)

    def bind(self, memory: LayerMemory) -> LightningMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return LightningMemory(self.recurrence.bind(memory.states, memory.log), draft_log(memory))

    def rerun(self, batch: StepBatch, memory: LightningMemory) -> None:
        """Advance the states over logged tokens alone."""
        no_heads = self.norm_O.new_empty(0, self.config.num_heads, self.config.head_dim)
        self._advance((no_heads, no_heads, no_heads), batch, memory)

    def _advance(self, tokens: Sequence[Tensor], batch: StepBatch, memory: LightningMemory) -> Tensor:
        return advance(self.recurrence, self._inputs, tokens, batch, memory.recurrent, memory.draft_log)

    def forward(self, hidden_TE: Tensor, step: Step, memory: LightningMemory) -> Tensor:
        qkv_TO, gate_TO = self.in_proj.project(hidden_TE)
        tokens = F.silu(qkv_TO).unflatten(-1, (self.config.num_heads, -1)).chunk(3, dim=-1)
        out_THD = self._advance(tokens, step.batch, memory)
        out_TO = self._rms_norm(out_THD.flatten(1), self.norm_O, NORM_EPS)
        return self.out_proj.multiply(self._sigmoid_gate(out_TO, gate_TO))

    def _inputs(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> LightningInputs:
        return LightningInputs(q_THD, k_THD, v_THD, self.log_decay_H)

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors; tables of decays that are published with them follow from the configuration."""
        qkv, gate = self.in_proj.weights
        yield f"{prefix}qkv_proj.weight", sharded(qkv, self.shard)
        yield f"{prefix}output_gate.weight", sharded(gate, self.shard)
        yield f"{prefix}norm.weight", sharded(self.norm_O, self.shard)
        yield from self.out_proj.targets(f"{prefix}out_proj.")
        num_heads, block = self.num_all_heads, self.config.block_size
        tables = {
            "slope_rate": (num_heads, 1, 1),
            "query_decay": (num_heads, block, 1),
            "key_decay": (num_heads, block, 1),
            "diagonal_decay": (1, num_heads, block, block),
        }
        for name, shape in tables.items():
            if f"{prefix}{name}" in names:
                yield f"{prefix}{name}", unused(*shape)


def log_decays(num_heads: int, depth: float) -> Tensor:
    """Return ``log_decay_H`` in float32: those of ALiBi, less in deeper layers."""
    slope_H = torch.tensor(2 ** (-8 / num_heads), dtype=torch.float64) ** torch.arange(1, num_heads + 1)
    return -(slope_H * (1 - depth + 1e-5)).float()
