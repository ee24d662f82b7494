"""Several residual streams, which are mixed into the input of each part of a layer, and which its output is added to.

All streams begin as the token's embedding, and a last mix of them is the final hidden state. How they are mixed is the
family's: by gates (``gated_streams.py``), or by hyper-connections (``hyper_connections.py``).

Shape suffixes: T tokens of the step, S streams, E hidden size.
"""

from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor, nn

from strandline.kernels.binding import Kernels
from strandline.kernels.expert_choices import Summand
from strandline.kernels.operation import Operation
from strandline.models.layers.parts.targets import NamedTargets

MAX_STREAMS: Final = 8
"""Published models have 4. A kernel holds all mixes of a token in registers: S² and more."""


class Streams(NamedTuple):
    """The streams within a step, to which the last part's output is not yet added."""

    stream_TSE: Tensor
    mixes: Any = None
    """How the family's mix adds that output; None: no part has read a mix of the streams."""
    output: Summand | None = None
    """That output, summed over all ranks."""


class StreamMix(Protocol):
    """What mixes the streams before a part of a layer; a module."""

    def __call__(self, stream: Streams) -> tuple[Tensor, Streams]:
        """Return the input of the part, and the streams with the output of the part before it."""


class LastMix(Protocol):
    """What mixes the streams before the output head; a module."""

    def __call__(self, stream: Streams) -> Tensor:
        """Return the final hidden state ``[T, E]``."""


class StreamsResidual(nn.Module):
    """A residual whose part reads a mix of the streams; the next mix adds its output to each of them.

    Args:
        mix: normalises the streams, too.
    """

    def __init__(self, mix: StreamMix) -> None:
        super().__init__()
        self.mix = mix

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return ()

    def connect(self, kernels: Kernels, part: object) -> None:
        """Compute with these kernels from now on."""
        del part
        self._ranks = kernels.ranks

    def enter(self, stream: Streams) -> tuple[Tensor, Streams]:
        """Return the part's input, and the streams."""
        entered: tuple[Tensor, Streams] = self.mix(stream)
        return entered

    def add(self, out: Summand, stream: Streams) -> Streams:
        """Return the streams with the part's output, a summand of this rank."""
        return stream._replace(output=out if self._ranks.size == 1 else self._ranks.sum(out))


def mix_of(residual: object) -> StreamMix:
    """Return what mixes the streams before the part that a residual connects."""
    assert isinstance(residual, StreamsResidual)
    return residual.mix


class StreamsEnds(nn.Module):
    """Copies of the embedding at first; a last mix is the final hidden state.

    Args:
        last_mix: the family loads it.
    """

    def __init__(self, last_mix: LastMix, num_streams: int) -> None:
        super().__init__()
        self.last_mix, self.num_streams = last_mix, num_streams

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return ()

    def connect(self, kernels: Kernels, part: None = None) -> None:
        """Look up nothing: a mix looks up its operations itself."""
        del kernels, part

    def begin(self, embedded_TE: Tensor) -> Streams:
        """Return the streams before the first layer."""
        return Streams(embedded_TE.unsqueeze(1).expand(-1, self.num_streams, -1))

    def leave(self, stream: Streams) -> Tensor:
        """Return the final, normalised hidden state."""
        return self.last_mix(stream)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield nothing: names of the last mix are the family's."""
        del prefix
        yield from ()
