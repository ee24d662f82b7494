"""A mixture of experts that gives each token one expert or none, by a router with a state (ZAYA).

The router is a small network. It reads, beside the token, its own state in the layer before: routers of one model share
a :class:`RouterState`. Its last choice is no expert at all.

Source: ``transformers`` (``zaya``).

Shape suffixes: T tokens of the step, E hidden size, Q size of the router's state, X experts and the choice of none.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.config_fields import Fields, read_eps
from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand
from strandline.kernels.experts.router import Routing
from strandline.kernels.rowwise.norm import rms_norm
from strandline.models.layers.feed_forward.experts import MAX_EXPERTS, Experts, ExpertsConfig
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, whole

ROUTING = Routing(top_k=1, is_normalised=False)


@dataclass(frozen=True, slots=True)
class SkippingMoeConfig:
    """Sizes of the layer."""

    hidden_size: int
    size: int
    num_experts: int
    router_size: int
    eps: float

    @classmethod
    def read(cls, fields: Fields) -> "SkippingMoeConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`."""
        fields.choice("hidden_act", ["silu"])
        fields.size("num_experts_per_tok", at_most=1)
        return cls(
            fields.size("hidden_size"),
            fields.size("moe_intermediate_size"),
            fields.size("num_experts", at_most=MAX_EXPERTS),
            fields.size("router_hidden_size"),
            read_eps(fields),
        )


class RouterState:
    """The state of a model's routers, which each layer hands to the next one within a step."""

    def __init__(self) -> None:
        self.state_TQ: Tensor | None = None


class SkippingMoe(nn.Module):
    """The layer. Experts are divided among shards; all route every token.

    Args:
        state: state of all routers of the model.
        is_first: whether it is the first of the model's layers, whose router reads no state.
    """

    operations = (rms_norm,)

    def __init__(self, config: SkippingMoeConfig, state: RouterState, site: Site, *, is_first: bool) -> None:
        super().__init__()
        self.config, self.state = config, state
        hidden_size, router_size = config.hidden_size, config.router_size
        self.down_proj = Projection(router_size, hidden_size, site, has_bias=True)
        self.state_scale_Q = None if is_first else site.parameter(router_size)
        self.norm_Q = site.gain(router_size)
        self.fc1 = Projection(router_size, router_size, site, has_bias=True)
        self.fc2 = Projection(router_size, router_size, site, has_bias=True)
        self.choose = Projection(config.num_experts + 1, router_size, site)
        self.bias_X = site.parameter(config.num_experts + 1, dtype=torch.float32)
        experts = ExpertsConfig(config.num_experts, hidden_size, config.size, ROUTING)
        self.experts = Experts(experts, site)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._rms_norm = kernels[rms_norm]

    def forward(self, hidden_TE: Tensor) -> Summand:
        # The last choice is that of an expert which no shard holds: it adds nothing.
        return self.experts.mix(hidden_TE, self._logits(hidden_TE), self.bias_X)

    def _logits(self, hidden_TE: Tensor) -> Tensor:
        state_TQ = self.down_proj.multiply(hidden_TE)
        if self.state_scale_Q is not None:
            assert self.state.state_TQ is not None
            state_TQ = torch.addcmul(state_TQ, self.state.state_TQ, self.state_scale_Q)
        self.state.state_TQ = state_TQ
        x_TQ = self._rms_norm(state_TQ, self.norm_Q, self.config.eps)
        x_TQ = F.gelu(self.fc2.multiply(F.gelu(self.fc1.multiply(x_TQ))))
        return self.choose.multiply(x_TQ)

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors; the experts come as one tensor, or as one each, whichever is in ``names``."""
        yield from self.down_proj.targets(f"{prefix}gate.down_proj.")
        if self.state_scale_Q is not None:
            yield f"{prefix}gate.router_states_scale", whole(self.state_scale_Q)
        yield f"{prefix}gate.balancing_biases", whole(self.bias_X)
        yield f"{prefix}gate.router_mlp.norm.weight", whole(self.norm_Q)
        for name, projection in {"fc1": self.fc1, "fc2": self.fc2, "out_proj": self.choose}.items():
            yield from projection.targets(f"{prefix}gate.router_mlp.{name}.")
        yield from self.experts.targets(f"{prefix}experts.", names)
