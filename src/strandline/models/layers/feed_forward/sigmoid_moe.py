"""A mixture of experts with a sigmoid router, with or without experts that every token takes.

Shape suffixes: T tokens of the step, E hidden size, X experts, O rows of the shared expert's fused projection.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from strandline.config_fields import Fields, read_mlp_layer_types
from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand
from strandline.kernels.experts.moe import SWIGLU, Activation, SharedExpert, SharedOutput
from strandline.kernels.experts.router import Routing
from strandline.kernels.gemm.linear import (
    LINEAR_OPERATIONS,
    bind_linear_and_logits,
    bind_logits,
    linear_and_logits,
    logits,
)
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.models.layers.feed_forward.experts import MAX_EXPERTS, Experts, ExpertsConfig
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, whole

ALWAYS_TAKEN: Final = 1e9
"""Added to the scores, at most 1, of experts that every token takes."""

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
    limit: float | None = None
    """Gates and up projections of all experts are clamped to it; None: they are not."""
    activation: Activation | None = None
    """What experts that are not shared compute instead of the clamped unit; None: that."""
    num_always: int = 0
    """How many of the experts, the last ones, every token takes: the router weights them as it does the others."""

    @property
    def experts(self) -> ExpertsConfig:
        """Sizes of the experts."""
        sizes = (self.num_experts, self.hidden_size, self.size)
        return ExpertsConfig(*sizes, self.routing, self.activation or SWIGLU._replace(limit=self.limit))

    @property
    def shared(self) -> GatedMlpConfig:
        """Sizes of the shared expert."""
        return GatedMlpConfig(self.hidden_size, self.shared_size, self.limit)


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


def read_feed_forwards(fields: Fields, num_layers: int) -> list[GatedMlpConfig | SigmoidMoeConfig]:
    """Read the feed-forward part of each layer: dense, or experts as ``read_experts`` reads them."""
    dense, sparse = GatedMlpConfig.read(fields), read_experts(fields)
    return [sparse if kind == "sparse" else dense for kind in read_mlp_layer_types(fields, num_layers)]


def build_feed_forward(config: GatedMlpConfig | SigmoidMoeConfig, site: Site) -> "GatedMlp | SigmoidMoe":
    """Return the feed-forward part of a layer, with unfilled parameters."""
    return SigmoidMoe(config, site) if isinstance(config, SigmoidMoeConfig) else GatedMlp(config, site)


class SigmoidMoe(nn.Module):
    """A mixture of experts; what the shared one makes is added as it is.

    Experts are divided among shards, and so are the shared expert's channels; all route every token.
    """

    operations = (logits, linear_and_logits, *LINEAR_OPERATIONS)

    def __init__(self, config: SigmoidMoeConfig, site: Site) -> None:
        super().__init__()
        hidden_size, num_experts = config.hidden_size, config.num_experts
        self.router_dtype = config.router_dtype or site.dtype
        self.router = Projection(num_experts, hidden_size, site.in_dtype(self.router_dtype))
        num_chosen = num_experts - config.num_always
        self.bias_X = site.parameter(num_chosen, dtype=torch.float32) if config.has_bias else None
        all_bias_X = None
        if config.num_always:
            all_bias_X = torch.full((num_experts,), ALWAYS_TAKEN, dtype=torch.float32, device=site.device)
        self.register_buffer("all_bias_X", all_bias_X, persistent=False)
        self.experts = Experts(config.experts, site)
        self.shared = None
        if config.shared_size:
            self.shared = GatedMlp(config.shared, site)

    all_bias_X: Tensor | None
    """Biases of all experts, those that every token takes included; None: no expert is taken by every token."""

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self.experts.takes_quantized

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        if self.all_bias_X is not None and self.bias_X is not None:
            self.all_bias_X[: len(self.bias_X)] = self.bias_X
        router = (self.router.weight, self.router_dtype)
        self._score, self._project, shared = bind_logits(kernels, *router), None, self.shared
        # In FP8 the norm has quantised what the shared expert reads, but not what the router does.
        if shared is not None and not shared.takes_quantized:
            self._project = bind_linear_and_logits(kernels, shared.gate_up.weight, None, *router)

    def forward(self, hidden_TE: Rows) -> Summand:
        plain_TE, shared = plain_rows(hidden_TE), self.shared
        bias_X = self.bias_X if self.all_bias_X is None else self.all_bias_X
        if self._project is not None and shared is not None and shared.gate_up.term is self.router.term is None:
            shared_TO, logits_TX = self._project(plain_TE)
            before = SharedExpert(shared_TO, shared.down.weight, None, shared.down.term)
            return self.experts.mix(hidden_TE, logits_TX, bias_X, before)
        if self.router.term is None:
            logits_TX = self._score(plain_TE)
        else:
            logits_TX = self.router.multiply(plain_TE.to(self.router_dtype))
        if shared is None:
            return self.experts.mix(hidden_TE, logits_TX, bias_X)
        output = SharedOutput(shared(hidden_TE if shared.takes_quantized else plain_TE))
        return self.experts.mix(hidden_TE, logits_TX, bias_X, output)

    def targets(self, prefix: str, names: frozenset[str], bias_name: str) -> NamedTargets:
        """Yield the published tensors; the experts come as one tensor, or as one each, whichever is in ``names``."""
        yield f"{prefix}gate.weight", whole(self.router.weight_OI)
        if self.bias_X is not None:
            yield f"{prefix}{bias_name}", whole(self.bias_X)
        if self.shared is not None:
            yield from self.shared.targets(f"{prefix}shared_experts.", names)
        yield from self.experts.targets(f"{prefix}experts.", names)


def feed_forward_targets(
    part: GatedMlp | SigmoidMoe, prefix: str, names: frozenset[str], bias_name: str
) -> NamedTargets:
    """Yield the published tensors of a feed-forward part, dense or sparse.

    Args:
        bias_name: name of the bias that takes part in the choice of experts.
    """
    if isinstance(part, SigmoidMoe):
        yield from part.targets(prefix, names, bias_name)
    else:
        yield from part.targets(prefix, names)
