"""The experts of a layer, in any format: their weights, their published tensors, and the operations that compute them.

A layer of experts is a router and one of these. Which operation computes which format is known here alone.

Shape suffixes: T tokens of the step, E channels that experts read and write, F intermediate size (with a gate, twice
that: the gate's rows come first), S features of the shared expert before its activation, X experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.experts.moe import (
    SWIGLU,
    Activation,
    ExpertBiases,
    ExpertsWeight,
    ExpertWeights,
    MixtureProjection,
    Router,
    SharedExpert,
    SharedOutput,
    mixture,
    projected_mixture,
)
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.weights import DenseWeight, Weight
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.normed_rows import NormedRows
from strandline.kernels.rowwise.quantized_rows import Rows
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, Piece, Target, spanned, unused, whole

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
    activation: Activation = SWIGLU
    has_biases: bool = False
    """Whether both products have a bias."""

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


def alternating(values: Tensor, held: range, num: int, *, is_transposed: bool = False) -> Target:
    """Return the target of experts in one tensor, weights or biases: rows of gates and up projections alternate.

    Args:
        values: ``[X, F, ...]``, those of the experts that are held, gates first.
        num: experts in the published tensor.
        is_transposed: see ``Piece``.
    """
    experts = zip(held, *values.unsqueeze(2).chunk(2, dim=1), strict=True)
    pieces = (Piece((slice(index, index + 1),), tuple(parts), is_transposed) for index, *parts in experts)
    shape = values.mT.shape if is_transposed else values.shape
    return Target((num, *shape[1:]), tuple(pieces))


class ExpertsPart(NamedTuple):
    """Neighbouring experts of a layer, all in one format."""

    up: ExpertsWeight
    down: ExpertsWeight
    held: range
    """Their numbers."""


class Experts(nn.Module):
    """A layer's experts, which are divided among shards.

    They are loaded as ordinary parameters, or else given weights by ``use_stored``: quantised ones, and maybe others.
    """

    def __init__(self, config: ExpertsConfig, site: Site) -> None:
        super().__init__()
        self.config, self.held = config, site.shard.span(config.num_experts, EXPERTS)
        num_held, num_channels, size = len(self.held), config.num_channels, config.size
        self.up_XFE = site.matrix(num_held, (1 + config.is_gated) * size, num_channels)
        self.down_XEF = site.matrix(num_held, num_channels, size)
        self.up_bias_XF = site.parameter(*self.up_XFE.shape[:2]) if config.has_biases else None
        self.down_bias_XE = site.parameter(*self.down_XEF.shape[:2]) if config.has_biases else None
        self._stored = dict[str, Sequence[ExpertsWeight]]()
        self.record: Callable[[Tensor], None] | None = None
        """Takes the experts of each token of a step, the best one first; to be set before ``use_kernels``."""

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (mixture, projected_mixture) if self.record is None else (mixture, projected_mixture, route)

    @property
    def share(self) -> float:
        """Share of the experts that a token takes."""
        return self.config.routing.top_k / self.config.num_experts

    @property
    def parts(self) -> tuple[ExpertsPart, ...]:
        """Weights before and after the activation, format by format."""
        if not self._stored:
            return (ExpertsPart(DenseWeight(self.up_XFE), DenseWeight(self.down_XEF), self.held),)
        parts, start = list[ExpertsPart](), self.held.start
        for up, down in zip(self._stored["up_XFE"], self._stored["down_XEF"], strict=True):
            parts.append(ExpertsPart(up, down, range(start, start + up.shape[0])))
            start += up.shape[0]
        return tuple(parts)

    def use_stored(self, name: str, weights: Sequence[ExpertsWeight]) -> None:
        """Compute with these weights of neighbouring experts instead of the parameter of that name, which is freed.

        Both parameters get the same formats.
        """
        delattr(self, name)
        self._stored[name] = weights

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return any(up.format.multiplies_fp8 for up in self._stored.get("up_XFE", ()))

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._mixture, self._projected_mixture, self._parts = kernels[mixture], kernels[projected_mixture], self.parts
        self._route = None if self.record is None else kernels[route]

    def mix(
        self,
        x_TE: Rows,
        logits_TX: Tensor,
        bias_X: Tensor | None = None,
        shared: SharedExpert | SharedOutput | None = None,
    ) -> Summand:
        """Return the weighted sum of each token's experts, and the shared one.

        Args:
            logits_TX: the router's; may be columns of a larger tensor. A choice beyond the experts adds nothing.
            bias_X: as in ``route``.
            shared: is added.
        """
        router, num_choices = Router(logits_TX, bias_X, self.config.routing), logits_TX.shape[-1]
        if self._route is not None and self.record is not None:
            self.record(self._route(*router)[1])
        *others, last = self._parts
        for part in others:
            shared = SharedOutput(added_up(self._mixture(x_TE, self._weights(part, num_choices), router, shared)))
        return self._mixture(x_TE, self._weights(last, num_choices), router, shared)

    @property
    def can_project(self) -> bool:
        """Whether ``mix_projected`` may be called: logits are needed by nothing else."""
        return self._route is None and len(self._parts) == 1

    def mix_projected(self, x_TE: Rows | NormedRows, projection: MixtureProjection, down: Weight) -> Summand:
        """Return what ``mix`` does, given the weight of the router and of the shared expert, and its second one."""
        (part,) = self._parts
        experts = self._weights(part, projection.sizes[1])
        return self._projected_mixture(x_TE, experts, projection, self.config.routing, down)

    def _weights(self, part: ExpertsPart, num_choices: int) -> ExpertWeights:
        """Return the experts of a part. Tokens may choose others, also such that no rank holds."""
        held = part.held if num_choices > len(part.held) else None
        return ExpertWeights(part.up, part.down, self.config.activation, held, self._biases(part.held))

    def _biases(self, experts: range) -> ExpertBiases | None:
        if self.up_bias_XF is None or self.down_bias_XE is None:
            return None
        rows = slice(experts.start - self.held.start, experts.stop - self.held.start)
        return ExpertBiases(self.up_bias_XF[rows], self.down_bias_XE[rows])

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
