"""A mixture of experts, with or without a shared one.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading.

Shape suffixes: T tokens of the step, E hidden size, F intermediate size, X experts, O rows of a fused
projection, S rows of the shared expert's gate and up projections.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from strandline.config_fields import Fields
from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand
from strandline.kernels.experts.block_scaled_moe import block_scaled_mixture
from strandline.kernels.experts.four_bit_moe import four_bit_mixture
from strandline.kernels.experts.moe import mixture
from strandline.kernels.experts.router import Routing
from strandline.kernels.gemm.weights import FourBitWeight, ScaledWeight
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.models.layers.parameters import matrix
from strandline.models.layers.projection import Projection, SummedProjection
from strandline.models.layers.shard import WHOLE, Shard
from strandline.models.layers.targets import NamedTargets, sharded, spanned, unused, whole

MAX_EXPERTS: Final = 2**14

EXPERTS: Final = "experts"
SHARED_CHANNELS: Final = "channels between the shared expert's projections"

STAND_IN_SIZE: Final = 8
"""Intermediate size of the shared expert of zeros that stands where a family has none: kernels of experts in FP8 or 4
bits always add one."""

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
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`.

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
    """A mixture of experts; if the configuration has one, with a shared expert, behind a sigmoid gate or not.

    Experts are divided among shards, and so are the shared expert's channels; all route every token.
    """

    operations = (mixture, block_scaled_mixture, four_bit_mixture)
    _scaled_experts: tuple[ScaledWeight, ScaledWeight] | None = None
    _four_bit_experts: tuple[FourBitWeight, FourBitWeight] | None = None

    def __init__(
        self, config: SparseMoeConfig, dtype: torch.dtype, device: torch.device | str, shard: Shard = WHOLE
    ) -> None:
        super().__init__()
        self.config, self.shard, self.experts = config, shard, shard.span(config.num_experts, EXPERTS)
        self.held = None if shard.count == 1 else self.experts
        hidden_size, size, num_held = config.hidden_size, config.size, len(self.experts)
        self.is_shared = config.shared_size > 0
        shared_size = shard.part_of(config.shared_size, SHARED_CHANNELS) if self.is_shared else STAND_IN_SIZE
        self.routing = Routing(config.top_k, config.is_normalised)
        self.sizes = [2 * shared_size, config.num_experts, int(config.is_shared_gated)]
        self.sizes.append(-sum(self.sizes) % PROJECTION_ROWS)
        self.in_proj = Projection(sum(self.sizes), hidden_size, dtype, device)
        """Rows: the shared expert's gate and up projections, the router, the shared expert's gate if any, and zeros."""
        self.in_proj.weight_OI[len(self.in_proj.weight_OI) - self.sizes[-1] :].zero_()
        self.shared_down = SummedProjection(hidden_size, shared_size, dtype, device, shard)
        if not self.is_shared:
            self.in_proj.weight_OI.zero_()
            self.shared_down.weight_OI.zero_()
        self.gate_up_XFE = matrix(num_held, 2 * size, hidden_size, dtype=dtype, device=device)
        self.down_XEF = matrix(num_held, hidden_size, size, dtype=dtype, device=device)

    @property
    def expert_share(self) -> float:
        """Part of the experts that a token takes."""
        return self.config.top_k / self.config.num_experts

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self._scaled_experts is not None or self.in_proj.takes_quantized

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._mixture, self._scaled_mixture = kernels[mixture], kernels[block_scaled_mixture]
        self._four_bit_mixture = kernels[four_bit_mixture]

    @property
    def expert_weights(self) -> tuple[Tensor, Tensor]:
        """Weights of the products before and after the activation."""
        return self.gate_up_XFE, self.down_XEF

    def keep_experts(self, gate_up: ScaledWeight | FourBitWeight, down: ScaledWeight | FourBitWeight) -> None:
        """Compute with these instead of the parameters, which are freed."""
        del self.gate_up_XFE, self.down_XEF
        if isinstance(gate_up, FourBitWeight) and isinstance(down, FourBitWeight):
            self._four_bit_experts = (gate_up, down)
        elif isinstance(gate_up, ScaledWeight) and isinstance(down, ScaledWeight):
            self._scaled_experts = (gate_up, down)

    @property
    def dense_with_experts(self) -> tuple[Projection, ...]:
        """Projections that must be quantised only if the experts are."""
        return (self.shared_down,)

    def forward(self, hidden_TE: Rows) -> Summand:
        in_TE = hidden_TE if self.in_proj.takes_quantized else plain_rows(hidden_TE)
        shared_TS, logits_TX, gate_T1, _ = self.in_proj.multiply(in_TE).split(self.sizes, dim=-1)
        projected = (shared_TS, logits_TX, gate_T1 if self.config.is_shared_gated else None)
        if self._scaled_experts is not None:
            weights = (*self._scaled_experts, self.shared_down.weight)
            return self._scaled_mixture(hidden_TE, *projected, *weights, self.routing, self.held)
        plain_TE = plain_rows(hidden_TE)
        if self._four_bit_experts is not None:
            in_4_bits = (*self._four_bit_experts, self.shared_down.weight)
            return self._four_bit_mixture(plain_TE, *projected, *in_4_bits, self.routing, self.held)
        experts = (self.gate_up_XFE, self.down_XEF, self.shared_down.weight)
        return self._mixture(plain_TE, *projected, *experts, self.routing, held=self.held)

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors; the experts come as one tensor, or as one each, whichever is in ``names``."""
        shared, router, shared_gate, _ = self.in_proj.weight_OI.split(self.sizes)
        gate, up = shared.chunk(2)
        yield f"{prefix}gate.weight", whole(router)
        if self.is_shared:
            yield f"{prefix}shared_expert_gate.weight", whole(shared_gate)
            yield f"{prefix}shared_expert.gate_proj.weight", sharded(gate, self.shard)
            yield f"{prefix}shared_expert.up_proj.weight", sharded(up, self.shard)
            yield from self.shared_down.targets(f"{prefix}shared_expert.down_proj.")
        weights = (self.gate_up_XFE, self.down_XEF)
        yield from expert_targets(*weights, self.experts, self.config.num_experts, f"{prefix}experts.", names)


def expert_targets(
    gate_up_XFE: Tensor, down_XEF: Tensor, held: range, num_experts: int, prefix: str, names: frozenset[str]
) -> NamedTargets:
    """Yield the published tensors of experts, which come as one tensor, or as one each, whichever is in ``names``.

    Args:
        held: which of ``num_experts`` the weights are of.
    """
    if f"{prefix}gate_up_proj" in names:
        yield f"{prefix}gate_up_proj", spanned(gate_up_XFE, held, num_experts)
        yield f"{prefix}down_proj", spanned(down_XEF, held, num_experts)
        return
    gate_XFE, up_XFE = gate_up_XFE.chunk(2, dim=1)
    for name, weights in {"gate_proj": gate_XFE, "up_proj": up_XFE, "down_proj": down_XEF}.items():
        yield from each_expert(weights, held, num_experts, prefix, f".{name}.weight")


def each_expert(weights: Tensor, held: range, num_experts: int, prefix: str, suffix: str) -> NamedTargets:
    """Yield the published tensors of experts that come as one each; those of other shards are not used."""
    for expert in range(num_experts):
        target = whole(weights[expert - held.start]) if expert in held else unused(*weights.shape[1:])
        yield f"{prefix}{expert}{suffix}", target
