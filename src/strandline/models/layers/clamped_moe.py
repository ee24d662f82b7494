"""Feed-forward layers whose gates and up projections are clamped: dense, and a mixture of experts with a shared one.

The clamped unit is torch's on all devices. Experts in FP8 or 4 bits are dequantised as they load.

Shape suffixes: T tokens of the step, E hidden size, X experts.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from strandline.config_fields import Fields
from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand
from strandline.kernels.rowwise.activation import clamped_swiglu
from strandline.models.layers.experts import Experts
from strandline.models.layers.mlp import GatedMlpConfig, gated_mlp_targets
from strandline.models.layers.projection import Projection, SummedProjection
from strandline.models.layers.sigmoid_moe import SigmoidMoeConfig
from strandline.models.layers.site import Site
from strandline.models.layers.targets import NamedTargets, whole

MIN_LIMIT, MAX_LIMIT = 1e-3, 1e6


def read_limit(fields: Fields) -> float:
    """Read what gates and up projections are clamped to; raises as :class:`strandline.config_fields.Fields`."""
    return fields.number("swiglu_limit", at_least=MIN_LIMIT, at_most=MAX_LIMIT)


class ClampedMlp(nn.Module):
    """A feed-forward layer with a clamped gated linear unit, whose channels are divided among shards.

    Args:
        limit: of gates and up projections, greater than 0.
    """

    operations = (clamped_swiglu,)

    def __init__(self, config: GatedMlpConfig, limit: float, site: Site) -> None:
        super().__init__()
        self.limit, self.shard = limit, site.shard
        size = config.part_of(site.shard)
        self.gate_up = Projection(2 * size, config.hidden_size, site)
        self.down = SummedProjection(config.hidden_size, size, site)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._swiglu = kernels[clamped_swiglu]

    def forward(self, hidden_TE: Tensor) -> Tensor:
        return self.down.multiply(self._swiglu(self.gate_up.multiply(hidden_TE), self.limit))

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from gated_mlp_targets(self.gate_up, self.down, self.shard, prefix)


class ClampedMoe(nn.Module):
    """A mixture of experts behind a sigmoid router; what the shared one makes, if there is one, is added as it is.

    Experts are divided among shards, and so are the shared expert's channels; all route every token.

    Args:
        limit: as of ``ClampedMlp``, for all experts.
    """

    def __init__(self, config: SigmoidMoeConfig, limit: float, site: Site) -> None:
        super().__init__()
        hidden_size, num_experts = config.hidden_size, config.num_experts
        self.router_dtype = config.router_dtype or site.dtype
        self.router = Projection(num_experts, hidden_size, site.in_dtype(self.router_dtype))
        self.bias_X = site.parameter(num_experts, dtype=torch.float32) if config.has_bias else None
        self.experts = Experts(replace(config.experts, limit=limit), site)
        self.shared = None
        if config.shared_size:
            self.shared = ClampedMlp(GatedMlpConfig(hidden_size, config.shared_size), limit, site)

    def forward(self, hidden_TE: Tensor) -> Summand:
        logits_TX = self.router.multiply(hidden_TE.to(self.router_dtype))
        shared_TE = None if self.shared is None else self.shared(hidden_TE)
        return self.experts.mix(hidden_TE, logits_TX, self.bias_X, shared_TE)

    def targets(self, prefix: str, names: frozenset[str], bias_name: str) -> NamedTargets:
        """Yield the published tensors; the experts come as one tensor, or as one each, whichever is in ``names``."""
        yield f"{prefix}gate.weight", whole(self.router.weight_OI)
        if self.bias_X is not None:
            yield f"{prefix}{bias_name}", whole(self.bias_X)
        if self.shared is not None:
            yield from self.shared.targets(f"{prefix}shared_experts.")
        yield from self.experts.targets(f"{prefix}experts.", names)
