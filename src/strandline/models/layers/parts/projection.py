"""A matrix that activations are multiplied with.

Shape suffixes: O outputs, I inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor, nn

from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.linear import (
    LINEAR_OPERATIONS,
    Gated,
    Linear,
    bind_gated_linear,
    bind_gated_linear_quantized,
    bind_linear,
)
from strandline.kernels.gemm.low_rank import Adapters, LowRankTerm
from strandline.kernels.gemm.weights import (
    DenseWeight,
    Layout,
    QuantizedWeight,
    ScaledWeight,
    StackedWeight,
    Weight,
)
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.activation import swiglu
from strandline.kernels.rowwise.quantized_rows import Rows
from strandline.kernels.rowwise.quantizing import QUANTIZED
from strandline.models.layers.parts.shard import WHOLE, Shard
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, sharded, stacked, unused, whole

PROJECTION_ROWS: Final = 8
"""A fused projection's rows are a multiple of this: others take cuBLAS's kernels of the generation before Hopper."""


class Projection(nn.Module):
    """A weight, possibly of several matrices one above the other, and a bias.

    It is loaded as an ordinary parameter, or else given its quantised weight by ``use_stored``. ``lay_out`` then
    chooses the form in which a parameter is multiplied with, after which it can be neither loaded nor moved.

    Args:
        num_outputs: rows of this shard.
        site: dtype and device; how rows are divided says ``shard``.
        shard: shard of the rows; by default all ranks hold them.
        num_parts: parts of equal size that the rows consist of, each divided among shards for itself.
    """

    operations: tuple[Operation[..., Any], ...] = LINEAR_OPERATIONS

    def __init__(
        self,
        num_outputs: int,
        num_inputs: int,
        site: Site,
        *,
        has_bias: bool = False,
        shard: Shard = WHOLE,
        num_parts: int = 1,
    ) -> None:
        super().__init__()
        self._shard, self._num_parts = shard, num_parts
        self.weight_OI: Tensor = site.matrix(num_outputs, num_inputs)
        self.bias_O = site.parameter(num_outputs) if has_bias else None
        self.weight: Weight = DenseWeight(self.weight_OI)
        self.adapters: Adapters | None = None
        """What adapters add to every product; set before ``use_kernels``."""

    @property
    def term(self) -> LowRankTerm | None:
        """What adapters add in the step that is being computed; None: nothing."""
        return None if self.adapters is None else self.adapters.term

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors, where all rows are published as one matrix."""
        for kind, rows in {"weight": self.weight_OI, "bias": self.bias_O}.items():
            if rows is not None:
                yield f"{prefix}{kind}", stacked(*(sharded(part, self._shard) for part in rows.chunk(self._num_parts)))

    def allocate(self, values_OI: Tensor) -> None:
        """Take memory for a parameter that was built without."""
        self.weight_OI = nn.Parameter(values_OI, requires_grad=False)
        self.weight = DenseWeight(self.weight_OI)

    def use_stored(self, weight: QuantizedWeight | StackedWeight) -> None:
        """Multiply with this weight, which stays as it is; the parameter is freed."""
        del self.weight_OI
        self.weight = weight

    def lay_out(self, layout: Layout) -> None:
        """Choose the form of the loaded weight; the parameter is freed. One given by ``use_stored`` stays as it is."""
        if self.is_quantized:
            return
        values_OI = self.weight_OI.data
        del self.weight_OI
        self.weight = layout(values_OI)

    @property
    def is_quantized(self) -> bool:
        """Whether its weight is quantised, or has parts that are."""
        return isinstance(self.weight, QuantizedWeight | StackedWeight)

    @property
    def takes_quantized(self) -> bool:
        """Whether it multiplies quantised rows, if the plain ones are kept beside them."""
        return isinstance(self.weight, ScaledWeight) or (
            isinstance(self.weight, StackedWeight) and self.weight.is_in_fp8
        )

    def fed_by(self, operation: Operation[..., Any], kernels: Kernels) -> Callable[..., Any]:
        """Return the version of an operation, a gate or a gated norm, whose results it takes: quantised or not."""
        return self.choose(kernels[operation], kernels[QUANTIZED[operation]])

    def choose(self, plain: Callable[..., Any], quantizing: Callable[..., Any]) -> Callable[..., Any]:
        """Return the one of two functions whose results it takes. In steps with adapters it takes plain rows."""
        if not isinstance(self.weight, ScaledWeight):
            return plain
        if self.adapters is None:
            return quantizing

        def chosen(*inputs: Any) -> Any:
            return quantizing(*inputs) if self.term is None else plain(*inputs)

        return chosen

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self.multiply: Linear = bind_linear(kernels, self.weight, self.bias_O, self.adapters)

    def forward(self, x: Rows) -> Tensor:
        """Return ``x weight^T + bias``. Layers call ``multiply``, the same without a module's overhead."""
        return self.multiply(x)


class FusedProjection(Projection):
    """Several projections of one input as one matrix: the rows of each follow those of the one before.

    Args:
        rows: the number of rows of each projection in this shard.
        multiple: the number of all rows is rounded up to a multiple of this; the rows that are added, the last part,
            are zeros. None: no rows are added.
    """

    def __init__(
        self,
        rows: Sequence[int],
        num_inputs: int,
        site: Site,
        *,
        has_bias: bool = False,
        multiple: int | None = None,
    ) -> None:
        padding = [] if multiple is None else [-sum(rows) % multiple]
        super().__init__(sum(rows) + sum(padding), num_inputs, site, has_bias=has_bias)
        self.part_rows = (*rows, *padding)
        self.weight_OI[sum(rows) :].zero_()

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weight of each projection, and the zeros that were added; only until ``lay_out``."""
        weights: tuple[Tensor, ...] = self.weight_OI.split(self.part_rows)
        return weights

    def project(self, x: Rows) -> tuple[Tensor, ...]:
        """Return the outputs of each projection, and those of the zeros that were added."""
        outputs: tuple[Tensor, ...] = self.multiply(x).split(self.part_rows, dim=-1)
        return outputs


class GatedProjection(Projection):
    """The rows of a gate, then those of an up projection, and the gated linear unit of their outputs.

    Its layer binds it, to the form that the next projection takes.
    """

    def gate_for(self, reader: Projection, kernels: Kernels, limit: float | None = None) -> Gated:
        """Return the gated linear unit, whose results another projection multiplies.

        Args:
            limit: see ``swiglu``; if there is one, the unit is a launch of its own.
        """
        if limit is not None:
            activate = reader.fed_by(swiglu, kernels)
            return lambda x: activate(self.multiply(x), limit)
        bound = (kernels, self.weight, self.adapters)
        return reader.choose(bind_gated_linear(*bound), bind_gated_linear_quantized(*bound))


class SummedProjection(Projection):
    """A projection whose inputs are divided among shards: what the shards return adds up to the outputs.

    Args:
        num_inputs: columns of this shard.
        has_bias: whether there is one; the first shard adds it.
    """

    def __init__(self, num_outputs: int, num_inputs: int, site: Site, *, has_bias: bool = False) -> None:
        super().__init__(num_outputs, num_inputs, site, has_bias=has_bias and site.shard.is_first)
        self._columns, self._is_biased = site.shard, has_bias

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield f"{prefix}weight", sharded(self.weight_OI, self._columns, dim=1)
        if self._is_biased:
            num_outputs = len(self.weight_OI)
            yield f"{prefix}bias", unused(num_outputs) if self.bias_O is None else whole(self.bias_O)
