"""A mixture of experts behind a sigmoid router, with or without experts that every token takes.

Shape suffixes: T tokens of the step, E hidden size, F intermediate size, X experts, O rows of the shared expert's fused
projection; of a token K are its experts.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from strandline.config_fields import Fields
from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.experts.block_scaled_moe import block_scaled_experts_glu
from strandline.kernels.experts.four_bit_moe import four_bit_experts_glu
from strandline.kernels.experts.moe import mixture
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.linear import LINEAR_OPERATIONS, bind_linear_and_logits, linear_and_logits
from strandline.kernels.gemm.weights import FourBitWeight, ScaledWeight
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.models.layers.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.moe import EXPERTS, MAX_EXPERTS, expert_targets
from strandline.models.layers.parameters import matrix, parameter
from strandline.models.layers.projection import Projection
from strandline.models.layers.shard import WHOLE, Shard
from strandline.models.layers.targets import NamedTargets, whole

ROUTER_EPS: Final = 1e-20
"""Epsilon of DeepSeek-V3's router, which keeps the quotient of a sum of zeros finite."""

MAX_SCALE: Final = 1e6
"""Largest factor of weights."""


@dataclass(frozen=True, slots=True)
class SigmoidMoeConfig:
    """Sizes of the layer."""

    hidden_size: int
    size: int
    shared_size: int
    """0: no expert is shared."""
    num_experts: int
    routing: Routing
    has_bias: bool
    """Whether a bias takes part in the choice."""
    router_dtype: torch.dtype | None = None
    """None: the router computes in the dtype of activations."""


def read_routing(fields: Fields, num_experts: int) -> Routing:
    """Read the router of DeepSeek-V3's kind; raises as :class:`strandline.config_fields.Fields`."""
    num_groups = fields.size("n_group", at_most=num_experts)
    if num_experts % num_groups or num_experts // num_groups < min(2, num_groups):
        fields.reject("n_group", f"such that groups of all {num_experts} experts are of one size, at least 2")
    top_groups = fields.size("topk_group", at_most=num_groups)
    return Routing(
        fields.size("num_experts_per_tok", at_most=num_experts // num_groups * top_groups),
        fields.flag("norm_topk_prob"),
        "sigmoid",
        ROUTER_EPS,
        fields.number("routed_scaling_factor", at_least=0, at_most=MAX_SCALE),
        num_groups,
        top_groups,
    )


def read_experts(fields: Fields) -> SigmoidMoeConfig:
    """Read experts whose router computes in float32; raises as :class:`strandline.config_fields.Fields`."""
    num_experts = fields.size("num_local_experts", at_most=MAX_EXPERTS)
    size = fields.size("moe_intermediate_size")
    return SigmoidMoeConfig(
        hidden_size=fields.size("hidden_size"),
        size=size,
        shared_size=size * fields.size("n_shared_experts", at_least=0, at_most=MAX_EXPERTS),
        num_experts=num_experts,
        routing=read_routing(fields, num_experts),
        has_bias=True,
        router_dtype=torch.float32,
    )


class SigmoidMoe(nn.Module):
    """A mixture of experts; what the shared one makes is added as it is.

    Experts are divided among shards, and so are the shared expert's channels; all route every token.
    """

    operations = (
        route,
        mixture,
        block_scaled_experts_glu,
        four_bit_experts_glu,
        linear_and_logits,
        *LINEAR_OPERATIONS,
    )
    _scaled_experts: tuple[ScaledWeight, ScaledWeight] | None = None
    _four_bit_experts: tuple[FourBitWeight, FourBitWeight] | None = None

    def __init__(
        self, config: SigmoidMoeConfig, dtype: torch.dtype, device: torch.device | str, shard: Shard = WHOLE
    ) -> None:
        super().__init__()
        self.config, self.experts = config, shard.span(config.num_experts, EXPERTS)
        self.held = None if shard.count == 1 else self.experts
        hidden_size, size, num_experts = config.hidden_size, config.size, config.num_experts
        self.router_dtype = config.router_dtype or dtype
        self.router = Projection(num_experts, hidden_size, self.router_dtype, device)
        self.bias_X: Tensor | None = None
        if config.has_bias:
            self.bias_X = parameter(num_experts, dtype=torch.float32, device=device)
        self.gate_up_XFE = matrix(len(self.experts), 2 * size, hidden_size, dtype=dtype, device=device)
        self.down_XEF = matrix(len(self.experts), hidden_size, size, dtype=dtype, device=device)
        self.shared = None
        if config.shared_size:
            self.shared = GatedMlp(GatedMlpConfig(hidden_size, config.shared_size), dtype, device, shard)

    @property
    def expert_share(self) -> float:
        """Part of the experts that a token takes."""
        return self.config.routing.top_k / self.config.num_experts

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self._scaled_experts is not None

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._mixture = kernels[mixture]
        self._route, self._scaled_experts_glu = kernels[route], kernels[block_scaled_experts_glu]
        self._four_bit_experts_glu = kernels[four_bit_experts_glu]
        # A mixture adds the shared expert by itself, unless that is in FP8 or 4 bits.
        self._shared_down = None
        if self.shared is not None and not self.shared.down.is_kept:
            self._shared_down = self.shared.down.weight
            shared_and_router = (self.shared.gate_up.weight, None, self.router.weight, self.router_dtype)
            self._project = bind_linear_and_logits(kernels, *shared_and_router)
        self._adds_shared = self.shared is not None and self._shared_down is None

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
        return ()

    def forward(self, hidden_TE: Rows) -> Summand:
        config, plain_TE = self.config, plain_rows(hidden_TE)
        if self._scaled_experts is not None:
            chosen, shared_TE = self._route_and_share(hidden_TE, plain_TE)
            return self._scaled_experts_glu(hidden_TE, *self._scaled_experts, *chosen, shared_TE, None, self.held)
        if self._four_bit_experts is not None:
            chosen, shared_TE = self._route_and_share(plain_TE, plain_TE)
            return self._four_bit_experts_glu(plain_TE, *self._four_bit_experts, *chosen, shared_TE, None, self.held)
        if self._shared_down is None:
            shared_TO, logits_TX = None, self._score(plain_TE)
        else:
            shared_TO, logits_TX = self._project(plain_TE)
        experts = (self.gate_up_XFE, self.down_XEF, self._shared_down)
        router = (config.routing, self.bias_X, self.held)
        out = self._mixture(plain_TE, shared_TO, logits_TX, None, *experts, *router)
        return out if self.shared is None or not self._adds_shared else added_up(out).add_(self.shared(plain_TE))

    def _route_and_share(self, hidden_TE: Rows, plain_TE: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Return the weights and numbers of tokens' experts, and what the shared expert makes of tokens."""
        chosen = self._route(self._score(plain_TE), self.bias_X, self.config.routing)
        if self.shared is None:
            return chosen, None
        return chosen, self.shared(hidden_TE if self.shared.takes_quantized else plain_TE)

    def _score(self, plain_TE: Tensor) -> Tensor:
        """Return the router's logits."""
        return self.router.multiply(plain_TE.to(self.router_dtype))

    def targets(self, prefix: str, names: frozenset[str], bias_name: str) -> NamedTargets:
        """Yield the published tensors; the experts come as one tensor, or as one each, whichever is in ``names``."""
        yield f"{prefix}gate.weight", whole(self.router.weight_OI)
        if self.bias_X is not None:
            yield f"{prefix}{bias_name}", whole(self.bias_X)
        if self.shared is not None:
            yield from self.shared.targets(f"{prefix}shared_experts.", names)
        weights = (self.gate_up_XFE, self.down_XEF)
        yield from expert_targets(*weights, self.experts, self.config.num_experts, f"{prefix}experts.", names)
