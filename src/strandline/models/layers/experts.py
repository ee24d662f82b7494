"""The experts of a layer, in any format: their weights, their published tensors, and the operations that compute them.

A layer of experts is a router and one of these. Which operation computes which format is known here alone.

Shape suffixes: T tokens of the step, E channels that experts read and write, F intermediate size (with a gate, twice
that: the gate's rows come first), S features of the shared expert before its activation, X experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand
from strandline.kernels.experts.moe import (
    Activation,
    ExpertsWeight,
    ExpertWeights,
    Router,
    SharedExpert,
    SharedOutput,
    clamped_experts_glu,
    mixture,
    with_shared,
)
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.weights import DenseWeight, QuantizedWeight, ScaledWeight
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.models.layers.projection import Projection
from strandline.models.layers.site import Site
from strandline.models.layers.targets import NamedTargets, spanned, unused, whole

MAX_EXPERTS: Final = 2**14

EXPERTS: Final = "experts"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Sizes of a layer's experts, and how tokens choose among them."""

    num_experts: int
    num_channels: int
    """Channels that they read and write."""
    size: int
    routing: Routing
    activation: Activation = Activation.SWIGLU
    limit: float | None = None
    """Gates and up projections are clamped to it; None: they are not."""

    @property
    def is_gated(self) -> bool:
        """Whether experts have a gate."""
        return self.activation.is_gated


class ExpertRows(NamedTuple):
    """Parameters of some of a layer's experts, and which of ``num`` experts they belong to."""

    up_XFE: Tensor
    down_XEF: Tensor
    held: range
    num: int

    @property
    def projections(self) -> dict[str, Tensor]:
        """Projections, by the names that they have in published tensors of one expert."""
        if self.up_XFE.shape[1] == self.down_XEF.shape[2]:
            return {"up_proj": self.up_XFE, "down_proj": self.down_XEF}
        gate_XFE, up_XFE = self.up_XFE.chunk(2, dim=1)
        return {"gate_proj": gate_XFE, "up_proj": up_XFE, "down_proj": self.down_XEF}

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors; the experts come as one tensor, or as one each, whichever is in ``names``."""
        up_name = "gate_up_proj" if "gate_proj" in self.projections else "up_proj"
        if f"{prefix}{up_name}" in names:
            yield f"{prefix}{up_name}", spanned(self.up_XFE, self.held, self.num)
            yield f"{prefix}down_proj", spanned(self.down_XEF, self.held, self.num)
            return
        for name, weights in self.projections.items():
            for expert in range(self.num):
                is_held = expert in self.held
                target = whole(weights[expert - self.held.start]) if is_held else unused(*weights.shape[1:])
                yield f"{prefix}{expert}.{name}.weight", target


class Experts(nn.Module):
    """A layer's experts, which are divided among shards.

    They are loaded as ordinary parameters, or else given quantised weights by ``keep``.

    Args:
        fused: second projection of a shared expert that is always computed with these experts, as a ``SharedExpert``:
            it stays quantised only if they do.
    """

    def __init__(self, config: ExpertsConfig, site: Site, *, fused: Projection | None = None) -> None:
        super().__init__()
        self.config, self.held = config, site.shard.span(config.num_experts, EXPERTS)
        num_held, num_channels, size = len(self.held), config.num_channels, config.size
        self.up_XFE = site.matrix(num_held, (1 + config.is_gated) * size, num_channels)
        self.down_XEF = site.matrix(num_held, num_channels, size)
        self._quantized = dict[str, ExpertsWeight]()
        self.fused = () if fused is None else (fused,)  # in a tuple: it is not a part of this module

    @property
    def share(self) -> float:
        """Share of the experts that a token takes."""
        return self.config.routing.top_k / self.config.num_experts

    @property
    def weights(self) -> tuple[ExpertsWeight, ExpertsWeight]:
        """Weights before and after the activation, in one format."""
        if self._quantized:
            return self._quantized["up_XFE"], self._quantized["down_XEF"]
        return DenseWeight(self.up_XFE), DenseWeight(self.down_XEF)

    def keep(self, name: str, weight: QuantizedWeight) -> None:
        """Compute with this weight instead of the parameter of that name, which is freed; both get the same format."""
        delattr(self, name)
        self._quantized[name] = weight

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return isinstance(self._quantized.get("up_XFE"), ScaledWeight)

    def takes_hidden(self, down: Projection) -> bool:
        """Return whether a shared expert with this second projection is to be passed before its activation."""
        return not self._quantized and self.config.limit is None and not down.is_kept

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (mixture,) if self.config.limit is None else (route, clamped_experts_glu)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        if self.config.limit is None:
            self._compute = partial(self._mix, kernels[mixture], *self.weights)
        else:
            self._compute = partial(self._mix_clamped, kernels[route], kernels[clamped_experts_glu])

    def mix(
        self, x_TE: Rows, logits_TX: Tensor, bias_X: Tensor | None = None, shared: SharedExpert | Tensor | None = None
    ) -> Summand:
        """Return the weighted sum of each token's experts, and the shared one.

        Args:
            logits_TX: of the router; may be columns of a larger tensor. A choice beyond the experts adds nothing.
            bias_X: as in ``route``.
            shared: a shared expert before its activation, or its output.
        """
        added = SharedOutput(shared) if isinstance(shared, Tensor) else shared
        return self._compute(x_TE, Router(logits_TX, bias_X, self.config.routing), added)

    def _mix(
        self,
        compute: Callable[..., Summand],
        up: ExpertsWeight,
        down: ExpertsWeight,
        x_TE: Rows,
        router: Router,
        shared: SharedExpert | SharedOutput | None,
    ) -> Summand:
        experts = ExpertWeights(up, down, self.config.activation, self._held(router))
        return compute(x_TE, experts, router, shared)

    def _mix_clamped(
        self,
        choose: Callable[..., tuple[Tensor, Tensor]],
        compute: Callable[..., Tensor],
        x_TE: Rows,
        router: Router,
        shared: SharedExpert | SharedOutput | None,
    ) -> Summand:
        out_TE = compute(
            plain_rows(x_TE), self.up_XFE, self.down_XEF, *choose(*router), self.config.limit, self._held(router)
        )
        assert not isinstance(shared, SharedExpert), "clamped experts are computed without their shared one"
        return out_TE if shared is None else with_shared(out_TE, shared)

    def _held(self, router: Router) -> range | None:
        """Return the experts of this rank; None: all that can be chosen."""
        return self.held if router.logits_TE.shape[-1] > len(self.held) else None

    def rows(self, span: range | None = None) -> ExpertRows:
        """Return parameters of the experts whose numbers are in ``span``, numbered from 0; None: of all experts."""
        span, held = range(self.config.num_experts) if span is None else span, self.held
        start, end = (min(max(bound, held.start), held.stop) for bound in (span.start, span.stop))
        ours = slice(start - held.start, end - held.start)
        numbers = range(start - span.start, end - span.start)
        return ExpertRows(self.up_XFE[ours], self.down_XEF[ours], numbers, len(span))

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors; the experts come as one tensor, or as one each, whichever is in ``names``."""
        yield from self.rows().targets(prefix, names)
