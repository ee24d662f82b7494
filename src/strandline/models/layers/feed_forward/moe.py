"""A mixture of experts, with or without a shared one.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading.

Shape suffixes: T tokens of the step, E hidden size, X experts, S rows of the shared expert's gate and up projections.
"""

from dataclasses import dataclass
from typing import Final

from torch import nn

from strandline.config_fields import Fields
from strandline.kernels.expert_choices import Summand
from strandline.kernels.experts.moe import MixtureProjection, SharedExpert
from strandline.kernels.experts.router import Routing
from strandline.kernels.rowwise.normed_rows import NormedRows, settled
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.models.layers.feed_forward.experts import MAX_EXPERTS, Experts, ExpertsConfig
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.parts.projection import PROJECTION_ROWS, FusedProjection, SummedProjection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, sharded, whole

SHARED_CHANNELS: Final = "channels between the shared expert's projections"


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

    @property
    def routing(self) -> Routing:
        """How a token's experts are chosen."""
        return Routing(self.top_k, self.is_normalised)

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


def build_feed_forward(config: GatedMlpConfig | SparseMoeConfig, site: Site) -> "GatedMlp | SparseMoe":
    """Return the feed-forward part of a layer, with unfilled parameters."""
    return SparseMoe(config, site) if isinstance(config, SparseMoeConfig) else GatedMlp(config, site)


class SparseMoe(nn.Module):
    """A mixture of experts; if the configuration has one, with a shared expert, behind a sigmoid gate or not.

    Experts are divided among shards, and so are the shared expert's channels; all route every token.
    """

    def __init__(self, config: SparseMoeConfig, site: Site) -> None:
        super().__init__()
        self.config, self.shard, hidden_size = config, site.shard, config.hidden_size
        is_shared = config.shared_size > 0
        shared_size = site.shard.part_of(config.shared_size, SHARED_CHANNELS) if is_shared else 0
        rows = (2 * shared_size, config.num_experts, int(is_shared and config.is_shared_gated))
        self.in_proj = FusedProjection(rows, hidden_size, site, multiple=PROJECTION_ROWS)
        """Rows: the shared expert's gate and up projections, the router, the shared expert's gate if any, and zeros."""
        self.shared_down = SummedProjection(hidden_size, shared_size, site) if is_shared else None
        experts = ExpertsConfig(config.num_experts, hidden_size, config.size, config.routing)
        self.experts = Experts(experts, site)

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self.experts.takes_quantized or self.in_proj.takes_quantized

    @property
    def takes_normed(self) -> bool:
        """Whether it takes rows whose norm has not been computed."""
        return self.shared_down is not None

    def forward(self, hidden_TE: Rows | NormedRows) -> Summand:
        down = self.shared_down
        if down is not None and self.experts.can_project and self.in_proj.term is down.term is None:
            shared_rows, num_experts, num_gates, num_zeros = self.in_proj.part_rows
            projection = MixtureProjection(self.in_proj.weight, (shared_rows, num_experts, num_gates, num_zeros))
            return self.experts.mix_projected(hidden_TE, projection, down.weight)
        hidden_TE = settled(hidden_TE)
        in_TE = hidden_TE if self.in_proj.takes_quantized else plain_rows(hidden_TE)
        shared_TS, logits_TX, gate_T1, _ = self.in_proj.project(in_TE)
        shared = None
        if down is not None:
            gate = gate_T1 if self.config.is_shared_gated else None
            shared = SharedExpert(shared_TS, down.weight, gate, down.term)
        return self.experts.mix(hidden_TE, logits_TX, None, shared)

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors; the experts come as one tensor, or as one each, whichever is in ``names``."""
        shared, router, shared_gate, _ = self.in_proj.weights
        gate, up = shared.chunk(2)
        yield f"{prefix}gate.weight", whole(router)
        if self.shared_down is not None:
            if self.config.is_shared_gated:
                yield f"{prefix}shared_expert_gate.weight", whole(shared_gate)
            yield f"{prefix}shared_expert.gate_proj.weight", sharded(gate, self.shard)
            yield f"{prefix}shared_expert.up_proj.weight", sharded(up, self.shard)
            yield from self.shared_down.targets(f"{prefix}shared_expert.down_proj.")
        yield from self.experts.targets(f"{prefix}experts.", names)
