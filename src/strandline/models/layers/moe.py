"""A mixture of experts, with or without a shared one.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading.

Shape suffixes: T tokens of the step, E hidden size, F intermediate size, X experts, O rows of a fused
projection, S rows of the shared expert's gate and up projections.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

import torch
from torch import Tensor, nn

from strandline.kernels.binding import Kernels
from strandline.kernels.moe import mixture
from strandline.model_config import Fields
from strandline.models.layers.parameters import parameter
from strandline.models.layers.projection import Projection
from strandline.models.targets import NamedTargets, whole

MAX_EXPERTS: Final = 2**14

STAND_IN_SIZE: Final = 8
"""Intermediate size of the shared expert of zeros that stands where a family has none: kernels always add one."""

PROJECTION_ROWS = 8
"""A fused projection's rows are a multiple of this, so that every row of what it returns starts on 16 bytes."""


@dataclass(frozen=True, slots=True)
class SparseMoeConfig:
    """Sizes of the layer."""

    hidden_size: int
    size: int
    shared_size: int
    """0: there is no shared expert."""
    num_experts: int
    top_k: int
    is_normalised: bool
    is_shared_gated: bool = True
    """Whether a gate multiplies what the shared expert adds."""

    @classmethod
    def read(cls, fields: Fields, *, is_normalised: bool, is_shared: bool = True) -> "SparseMoeConfig":
        """Read a text configuration; raises as :class:`strandline.model_config.Fields`.

        Args:
            is_shared: whether the family has a shared expert.
        """
        num_experts = fields.size("num_experts", at_most=MAX_EXPERTS)
        return cls(
            hidden_size=fields.size("hidden_size"),
            size=fields.size("moe_intermediate_size"),
            shared_size=fields.size("shared_expert_intermediate_size") if is_shared else 0,
            num_experts=num_experts,
            top_k=fields.size("num_experts_per_tok", at_most=num_experts),
            is_normalised=is_normalised,
        )


class SparseMoe(nn.Module):
    """A mixture of experts; if the configuration has one, with a shared expert, behind a sigmoid gate or not."""

    operations = (mixture,)

    def __init__(self, config: SparseMoeConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden_size, size, shared_size = config.hidden_size, config.size, config.shared_size or STAND_IN_SIZE
        self.is_shared = config.shared_size > 0
        self.top_k, self.is_normalised = config.top_k, config.is_normalised
        self.sizes = [2 * shared_size, config.num_experts, int(config.is_shared_gated)]
        self.sizes.append(-sum(self.sizes) % PROJECTION_ROWS)
        self.in_proj = Projection(sum(self.sizes), hidden_size, dtype, device)
        """Rows: the shared expert's gate and up projections, the router, the shared expert's gate if any, and zeros."""
        self.in_proj.weight_OI[len(self.in_proj.weight_OI) - self.sizes[-1] :].zero_()
        self.shared_down = Projection(hidden_size, shared_size, dtype, device)
        if not self.is_shared:
            self.in_proj.weight_OI.zero_()
            self.shared_down.weight_OI.zero_()
        self.gate_up_XFE = parameter(config.num_experts, 2 * size, hidden_size, dtype=dtype, device=device)
        self.down_XEF = parameter(config.num_experts, hidden_size, size, dtype=dtype, device=device)

    @property
    def expert_share(self) -> float:
        """Part of the experts that a token takes."""
        return self.top_k / len(self.down_XEF)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._mixture = kernels[mixture]

    def forward(self, hidden_TE: Tensor) -> Tensor:
        shared_TS, logits_TX, gate_T1, _ = self.in_proj.multiply(hidden_TE).split(self.sizes, dim=-1)
        if not gate_T1.shape[1]:
            # Kernels always multiply by a gate: one that is open stands where a family has none.
            gate_T1 = hidden_TE.new_full((len(hidden_TE), 1), inf)
        experts = (self.gate_up_XFE, self.down_XEF, self.shared_down.weight)
        projected = (shared_TS, logits_TX, gate_T1)
        return self._mixture(hidden_TE, *projected, *experts, self.top_k, is_normalised=self.is_normalised)

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors; the experts come as one tensor, or as one each, whichever is in ``names``."""
        shared, router, shared_gate, _ = self.in_proj.weight_OI.split(self.sizes)
        gate, up = shared.chunk(2)
        yield f"{prefix}gate.weight", whole(router)
        if self.is_shared:
            yield f"{prefix}shared_expert_gate.weight", whole(shared_gate)
            yield f"{prefix}shared_expert.gate_proj.weight", whole(gate)
            yield f"{prefix}shared_expert.up_proj.weight", whole(up)
            yield f"{prefix}shared_expert.down_proj.weight", whole(self.shared_down.weight_OI)
        yield from expert_targets(self.gate_up_XFE, self.down_XEF, f"{prefix}experts.", names)


def expert_targets(gate_up_XFE: Tensor, down_XEF: Tensor, prefix: str, names: frozenset[str]) -> NamedTargets:
    """Yield the published tensors of experts, which come as one tensor, or as one each, whichever is in ``names``."""
    if f"{prefix}gate_up_proj" in names:
        yield f"{prefix}gate_up_proj", whole(gate_up_XFE)
        yield f"{prefix}down_proj", whole(down_XEF)
        return
    for expert, (gate_up_FE, down_EF) in enumerate(zip(gate_up_XFE, down_XEF, strict=True)):
        gate, up = gate_up_FE.chunk(2)
        yield f"{prefix}{expert}.gate_proj.weight", whole(gate)
        yield f"{prefix}{expert}.up_proj.weight", whole(up)
        yield f"{prefix}{expert}.down_proj.weight", whole(down_EF)
