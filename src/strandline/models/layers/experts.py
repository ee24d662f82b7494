"""The experts of a layer, in any format: their weights, their published tensors, and the operations that compute them.

A layer of experts is a router and one of these. Which operation computes which format is known here alone.

Shape suffixes: T tokens of the step, E channels that experts read and write, F intermediate size (with a gate, twice
that: the gate's rows come first), S features of the shared expert before its activation, X experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from strandline.errors import EngineError
from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.experts.block_scaled_moe import block_scaled_experts_glu, block_scaled_mixture
from strandline.kernels.experts.four_bit_moe import four_bit_experts_glu, four_bit_mixture
from strandline.kernels.experts.moe import clamped_experts_glu, mixture, mixture_relu_squared
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.weights import DenseWeight, FourBitWeight, ScaledWeight, Weight
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.models.layers.projection import Projection
from strandline.models.layers.site import Site
from strandline.models.layers.targets import NamedTargets, spanned, unused, whole

MAX_EXPERTS: Final = 2**14

EXPERTS: Final = "experts"

ExpertsWeight = DenseWeight | ScaledWeight | FourBitWeight
"""One matrix of every expert, ``[X, O, I]``."""


class Activation(Enum):
    """What experts compute between their two products."""

    SWIGLU = auto()
    """``silu(gate) * up``."""
    RELU_SQUARED = auto()
    """``relu(up) ** 2``: there is no gate."""


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
        return self.activation is Activation.SWIGLU

    @property
    def takes_formats(self) -> bool:
        """Whether operations compute such experts in FP8 and in 4 bits."""
        return self.is_gated and self.limit is None


class SharedHidden(NamedTuple):
    """A shared expert before its activation; the operation that computes the experts does the rest."""

    projected_TS: Tensor
    """Outputs of its first projections; may be overwritten."""
    down: Weight
    gate_T1: Tensor | None = None
    """A sigmoid of it multiplies the shared expert's output; None: that is added as it is."""


class RoutedTokens(NamedTuple):
    """Tokens and what their router computes; arguments of ``Experts.mix``."""

    x_TE: Rows
    logits_TX: Tensor
    bias_X: Tensor | None
    shared: SharedHidden | Tensor | None
    held: range | None
    """The experts of this rank; None: all that can be chosen."""

    @property
    def plain_TE(self) -> Tensor:
        """The tokens as they were before quantising."""
        return plain_rows(self.x_TE)

    @property
    def hidden(self) -> tuple[Tensor | None, Weight | None, Tensor | None]:
        """The fields of a shared expert that is yet to be computed."""
        return self.shared if isinstance(self.shared, SharedHidden) else (None, None, None)

    def with_output(self, out: Summand) -> Summand:
        """Add the output of a shared expert that was computed before."""
        return added_up(out).add_(self.shared) if isinstance(self.shared, Tensor) else out


Choose = Callable[[Tensor, Tensor | None, Routing], tuple[Tensor, Tensor]]
"""The operation ``route``."""


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

    They are loaded as ordinary parameters, or else given weights in FP8 or 4 bits by ``keep``.

    Args:
        fused: second projection of a shared expert that is always computed with these experts, as a ``SharedHidden``:
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

    def keep(self, name: str, weight: ScaledWeight | FourBitWeight) -> None:
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
        if not self.config.is_gated:
            return (mixture_relu_squared,)
        if self.config.limit is not None:
            return (route, clamped_experts_glu)
        in_formats = (block_scaled_mixture, block_scaled_experts_glu, four_bit_mixture, four_bit_experts_glu)
        return (route, mixture, *in_formats)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._compute = self._bind(kernels)

    def mix(
        self, x_TE: Rows, logits_TX: Tensor, bias_X: Tensor | None = None, shared: SharedHidden | Tensor | None = None
    ) -> Summand:
        """Return the weighted sum of each token's experts, and the shared one.

        Args:
            logits_TX: of the router; may be columns of a larger tensor. A choice beyond the experts adds nothing.
            bias_X: as in ``route``.
            shared: a shared expert before its activation, or its output.
        """
        held = self.held if logits_TX.shape[-1] > len(self.held) else None
        return self._compute(RoutedTokens(x_TE, logits_TX, bias_X, shared, held))

    def _bind(self, kernels: Kernels) -> Callable[[RoutedTokens], Summand]:
        match self.weights:
            case DenseWeight(up_XFE), DenseWeight(down_XEF):
                return self._bind_dense(kernels, up_XFE, down_XEF)
            case ScaledWeight() as up, ScaledWeight() as down:
                fp8 = (kernels[route], kernels[block_scaled_mixture], kernels[block_scaled_experts_glu])
                return partial(self._mix_quantized, *fp8, up, down)
            case FourBitWeight() as up, FourBitWeight() as down:
                four_bit = (kernels[route], kernels[four_bit_mixture], kernels[four_bit_experts_glu])
                mix = partial(self._mix_quantized, *four_bit, up, down)
                return lambda tokens: mix(tokens._replace(x_TE=tokens.plain_TE))
        raise EngineError("the two weights of experts differ in their format")

    def _bind_dense(self, kernels: Kernels, up_XFE: Tensor, down_XEF: Tensor) -> Callable[[RoutedTokens], Summand]:
        if not self.config.is_gated:
            return partial(self._mix_relu_squared, kernels[mixture_relu_squared], up_XFE, down_XEF)
        if self.config.limit is not None:
            return partial(self._mix_clamped, kernels[route], kernels[clamped_experts_glu], up_XFE, down_XEF)
        return partial(self._mix_gated, kernels[mixture], up_XFE, down_XEF)

    def _mix_gated(
        self, compute: Callable[..., Summand], up_XFE: Tensor, down_XEF: Tensor, tokens: RoutedTokens
    ) -> Summand:
        projected_TS, down, gate_T1 = tokens.hidden
        projected = (projected_TS, tokens.logits_TX, gate_T1)
        router = (self.config.routing, tokens.bias_X, tokens.held)
        return tokens.with_output(compute(tokens.plain_TE, *projected, up_XFE, down_XEF, down, *router))

    def _mix_relu_squared(
        self, compute: Callable[..., Tensor], up_XFE: Tensor, down_XEF: Tensor, tokens: RoutedTokens
    ) -> Summand:
        projected_TS, down, _ = tokens.hidden
        router = (self.config.routing, tokens.bias_X, tokens.held)
        arguments = (projected_TS, tokens.logits_TX, up_XFE, down_XEF, down)
        return tokens.with_output(compute(tokens.plain_TE, *arguments, *router))

    def _mix_clamped(
        self, choose: Choose, compute: Callable[..., Tensor], up_XFE: Tensor, down_XEF: Tensor, tokens: RoutedTokens
    ) -> Summand:
        chosen = choose(tokens.logits_TX, tokens.bias_X, self.config.routing)
        limits = (self.config.limit, tokens.held)
        return tokens.with_output(compute(tokens.plain_TE, up_XFE, down_XEF, *chosen, *limits))

    def _mix_quantized(
        self,
        choose: Choose,
        compute: Callable[..., Summand],
        compute_chosen: Callable[..., Summand],
        up: ExpertsWeight,
        down: ExpertsWeight,
        tokens: RoutedTokens,
    ) -> Summand:
        x_TE, logits_TX, bias_X, shared, held = tokens
        if isinstance(shared, SharedHidden):
            assert bias_X is None, "operations that complete a shared expert choose without a bias"
            projected = (shared.projected_TS, logits_TX, shared.gate_T1)
            return compute(x_TE, *projected, up, down, shared.down, self.config.routing, held)
        chosen = choose(logits_TX, bias_X, self.config.routing)
        return compute_chosen(x_TE, up, down, *chosen, shared, None, held)

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
