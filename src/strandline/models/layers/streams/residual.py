"""The residual stream: what the parts of a layer read from it, and how their outputs are added to it.

A *residual* connects one part of a layer, a mixer or a feed-forward part, to the stream. The norm before a part also
adds what the part before it left, in one kernel: a stream therefore carries an output that is not yet added.

Shape suffixes: T tokens of the step, N rows that are wanted, E hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from strandline.kernels.binding import Kernels
from strandline.kernels.collectives.rank_sums import bind_sum_add_norm
from strandline.kernels.expert_choices import Summand, added_up, weighed
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.norm import (
    add_rms_norm,
    add_rms_norm_zero_centered,
    rms_norm,
    rms_norm_zero_centered,
)
from strandline.kernels.rowwise.normed_rows import NormKind, deferred_add_norm
from strandline.kernels.rowwise.quantizing import QUANTIZED, with_quantized
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, whole


class Stream(NamedTuple):
    """A residual stream within a step: the sum of two tensors."""

    residual_TE: Tensor
    added: Summand | None = None
    """The last part's output; None: it is in the residual."""
    is_summed: bool = True
    """Whether the output is the sum over all ranks; else it is this rank's summand."""

    def output(self, sum_over_ranks: Callable[[Summand], Tensor]) -> Tensor:
        """Return the last part's output as the sum over all ranks."""
        assert self.added is not None
        return added_up(self.added) if self.is_summed else sum_over_ranks(self.added)

    def settled(self, sum_over_ranks: Callable[[Summand], Tensor]) -> Tensor:
        """Return the stream as one tensor; the output may be overwritten."""
        return self.residual_TE if self.added is None else self.output(sum_over_ranks).add_(self.residual_TE)

    def rows(self, rows_N: Tensor) -> "Stream":
        """Return some rows; the output is a tensor."""
        assert isinstance(self.added, Tensor)
        added_NE = self.added.index_select(0, rows_N)
        return self._replace(residual_TE=self.residual_TE.index_select(0, rows_N), added=added_NE)


@runtime_checkable
class ReadsQuantized(Protocol):
    """A part that can read quantised rows."""

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""


def reads_quantized(part: object) -> bool:
    """Return whether a part of a layer takes quantised rows."""
    return isinstance(part, ReadsQuantized) and part.takes_quantized


@runtime_checkable
class ReadsNormed(Protocol):
    """A part that can read rows whose norm has not been computed."""

    @property
    def takes_normed(self) -> bool:
        """Whether it takes such rows."""


def reads_normed(part: object) -> bool:
    """Return whether a part of a layer takes rows whose norm has not been computed."""
    return isinstance(part, ReadsNormed) and part.takes_normed


class Residual(Protocol):
    """Connects one part of a layer to the stream; a module. What a stream is differs among families."""

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        """Operations that it uses."""

    def connect(self, kernels: Kernels, part: object) -> None:
        """Compute with these kernels from now on, for this part."""

    def enter(self, stream: Any) -> tuple[Any, Any]:
        """Return the part's input, quantised if the part takes that, and the stream."""

    def add(self, out: Any, stream: Any) -> Any:
        """Return the stream with the part's output, a summand of this rank."""


class StreamEnds(Protocol):
    """How a stream begins and ends; a module."""

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        """Operations that it uses."""

    def connect(self, kernels: Kernels, part: None = None) -> None:
        """Compute with these kernels from now on."""

    def begin(self, embedded_TE: Tensor) -> Any:
        """Return the stream before the first layer."""

    def leave(self, stream: Any) -> Tensor:
        """Return the final, normalised hidden state."""

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors, unless the family names them."""


@runtime_checkable
class ReadableStream(Protocol):
    """Ends of a stream that is one tensor, which others can read between layers."""

    def read(self, stream: Any, out_TE: Tensor) -> Any:
        """Copy the stream to a tensor, and return it."""


@dataclass(frozen=True, slots=True)
class ResidualNorm:
    """How a family normalises its residual stream."""

    norm: Operation[[Tensor, Tensor, float], Tensor]
    """Normalises the stream, given a weight and ``eps``."""
    add_norm: Operation[[Summand, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """Adds a part's output to the stream and normalises it, given a weight and ``eps``; also returns the new stream."""
    eps: float
    weight: Callable[..., Tensor]
    """Creates the weight of a norm, given a site and a size: ``gain``, or ``parameter`` if it is added to 1."""


def rms(eps: float) -> ResidualNorm:
    """Return the RMS norm whose weight multiplies the rounded result."""
    return ResidualNorm(rms_norm, add_rms_norm, eps, Site.gain)


def zero_centered(eps: float) -> ResidualNorm:
    """Return the RMS norm whose weight is added to 1."""
    return ResidualNorm(rms_norm_zero_centered, add_rms_norm_zero_centered, eps, Site.parameter)


class NormedResidual(nn.Module):
    """A residual with a norm."""

    norm_E: Tensor

    def __init__(self, norm: ResidualNorm, hidden_size: int, site: Site) -> None:
        super().__init__()
        self.norm, self.norm_E = norm, norm.weight(site, hidden_size)


class PreNorm(NormedResidual):
    """Parts read the normalised stream.

    Args:
        multiplier: scales each part's output before it is added.
    """

    def __init__(self, norm: ResidualNorm, hidden_size: int, site: Site, *, multiplier: float = 1.0) -> None:
        super().__init__(norm, hidden_size, site)
        self.multiplier = multiplier

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (deferred_add_norm, *with_quantized(self.norm.norm, self.norm.add_norm))

    def connect(self, kernels: Kernels, part: object = None) -> None:
        """Compute with these kernels from now on."""
        norm: Operation[..., Any] = self.norm.norm
        add_norm: Operation[..., Any] = self.norm.add_norm
        if reads_quantized(part):
            norm, add_norm = QUANTIZED[norm], QUANTIZED[add_norm]
        self._norm, self._add_norm, self._sum = kernels[norm], kernels[add_norm], kernels.ranks.sum
        self._sum_add_norm = bind_sum_add_norm(kernels, add_norm)
        if kernels.ranks.size == 1 and reads_normed(part):
            kind = NormKind(self.norm.norm is rms_norm_zero_centered, reads_quantized(part))
            self._add_norm = self._sum_add_norm = partial(kernels[deferred_add_norm], kind=kind)

    def enter(self, stream: Stream) -> tuple[Any, Stream]:
        """Return the part's input, quantised if the part takes that, and the stream."""
        residual_TE, added, is_summed = stream
        if added is None:
            return self._norm(residual_TE, self.norm_E, self.norm.eps), stream
        add_norm = self._add_norm if is_summed else self._sum_add_norm
        normed_TE, residual_TE = add_norm(added, residual_TE, self.norm_E, self.norm.eps)
        return normed_TE, Stream(residual_TE)

    def add(self, out: Summand, stream: Stream) -> Stream:
        """Return the stream with the part's output, a summand of this rank."""
        return Stream(stream.residual_TE, weighed(out, self.multiplier), is_summed=False)

    def begin(self, embedded_TE: Tensor) -> Stream:
        """Return the stream before the first layer."""
        return Stream(embedded_TE)

    def read(self, stream: Stream, out_TE: Tensor) -> Stream:
        """Copy the stream to a tensor, and return it."""
        if stream.added is None:
            out_TE.copy_(stream.residual_TE)
            return stream
        added_TE = stream.output(self._sum)
        torch.add(stream.residual_TE, added_TE, out=out_TE)
        return Stream(stream.residual_TE, added_TE)

    def leave(self, stream: Stream) -> Tensor:
        """Return the final, normalised hidden state."""
        hidden_TE: Tensor = self.enter(stream)[0]
        return hidden_TE

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors of the norm after the last layer."""
        yield f"{prefix}norm.weight", whole(self.norm_E)


class SandwichNorm(PreNorm):
    """Parts read the normalised stream; their outputs are normalised, too."""

    def __init__(self, norm: ResidualNorm, hidden_size: int, site: Site) -> None:
        super().__init__(norm, hidden_size, site)
        self.out_norm_E = norm.weight(site, hidden_size)

    def connect(self, kernels: Kernels, part: object = None) -> None:
        """Compute with these kernels from now on."""
        super().connect(kernels, part)
        self._out_norm = kernels[self.norm.norm]

    def add(self, out: Summand, stream: Stream) -> Stream:
        """Return the stream with the part's output, a summand of this rank."""
        return Stream(stream.residual_TE, self._out_norm(self._sum(out), self.out_norm_E, self.norm.eps))


class PostNorm(NormedResidual):
    """Parts read the stream itself; their outputs are normalised."""

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (self.norm.norm,)

    def connect(self, kernels: Kernels, part: object) -> None:
        """Compute with these kernels from now on."""
        del part
        self._norm, self._sum = kernels[self.norm.norm], kernels.ranks.sum

    def enter(self, stream: Stream) -> tuple[Tensor, Stream]:
        """Return the part's input, and the stream."""
        stream_TE = stream.settled(self._sum)
        return stream_TE, Stream(stream_TE)

    def add(self, out: Summand, stream: Stream) -> Stream:
        """Return the stream with the part's output, a summand of this rank."""
        return Stream(stream.residual_TE, self._norm(self._sum(out), self.norm_E, self.norm.eps))


class Unnormed(nn.Module):
    """A residual of a part that normalises what it reads by itself."""

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return ()

    def connect(self, kernels: Kernels, part: object) -> None:
        """Compute with these kernels from now on."""
        del part
        self._sum = kernels.ranks.sum

    def enter(self, stream: Stream) -> tuple[Tensor, Stream]:
        """Return the part's input, and the stream."""
        stream_TE = stream.settled(self._sum)
        return stream_TE, Stream(stream_TE)

    def add(self, out: Summand, stream: Stream) -> Stream:
        """Return the stream with the part's output, a summand of this rank."""
        return Stream(stream.residual_TE, self._sum(out))


class StreamScale(NamedTuple):
    """What the stream, and what a part adds to it, are multiplied by."""

    stream: float
    added: float


class NormedStream(PreNorm):
    """Parts read the normalised stream and add to that, both scaled."""

    def __init__(self, norm: ResidualNorm, hidden_size: int, site: Site, scale: StreamScale) -> None:
        super().__init__(norm, hidden_size, site)
        self.scale = scale

    def connect(self, kernels: Kernels, part: object = None) -> None:
        """Compute with these kernels from now on."""
        del part  # the stream goes on from the norm's result, which must not be quantised
        super().connect(kernels)

    def enter(self, stream: Stream) -> tuple[Any, Stream]:
        """Return the part's input, and the stream."""
        normed_TE, _ = super().enter(stream)
        return normed_TE, Stream(normed_TE)

    def add(self, out: Summand, stream: Stream) -> Stream:
        """Return the stream with the part's output, a summand of this rank."""
        return Stream(stream.residual_TE * self.scale.stream, self._sum(out) * self.scale.added)
