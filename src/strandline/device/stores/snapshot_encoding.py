"""The encoding of entries in host memory and on disk: recurrent states of snapshots in fewer bits, the rest unchanged.

Layout and size of the encoded bytes follow from the specs (``ModelSpec.stored``). Bytes are encoded and decoded on the
device that holds them, by asynchronous torch operations; stores decide where they are kept.

- bfloat16: off by at most ``2**-8`` of the value; the few float32 values beyond its range become its largest.
- int8: codes from -127 to 127 times a scale that all values along a state's last dimension share, which is a 127th of
  the largest of them. The error is at most half the scale. Values that are not finite read as NaN, and do not affect
  others.

Shape suffixes: X bytes, L equal layers, V values that share a scale; M further dimensions of a state.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from strandline.specs import LayerSpec, ModelSpec, TensorSpec, state_bytes

MAX_CODE: Final = 127
NOT_FINITE: Final = -128
"""The code of NaN and infinity."""
MIN_SCALE: Final = torch.finfo(torch.float32).tiny
MAX_SCALE: Final = torch.finfo(torch.float32).max / MAX_CODE * (1 - 2.0**-20)
"""The largest code times the largest scale is finite."""
MAX_BFLOAT16: Final = torch.finfo(torch.bfloat16).max


class Encoding(Protocol):
    """The encoding of stored entries."""

    def encode(self, entry_X: Tensor) -> Tensor:
        """Return an entry's encoded bytes, in new memory or the entry's."""

    def num_bytes(self, entry_X: Tensor) -> int:
        """Return how many bytes an entry's encoded bytes are."""

    def room(self, entry_X: Tensor) -> Tensor:
        """Return memory for an entry's encoded bytes, on the entry's device, to be passed to ``decode``."""

    def decode(self, rest_X: Tensor, entry_X: Tensor) -> None:
        """Write an entry from its encoded bytes, which are in its ``room``."""


class AsIs:
    """Bytes are stored unchanged."""

    def encode(self, entry_X: Tensor) -> Tensor:
        return entry_X

    def num_bytes(self, entry_X: Tensor) -> int:
        return len(entry_X)

    def room(self, entry_X: Tensor) -> Tensor:
        return entry_X

    def decode(self, rest_X: Tensor, entry_X: Tensor) -> None:
        """Do nothing: the entry was its own room."""


AS_IS: Final = AsIs()


class _Run(NamedTuple):
    """A tensor of equal layers that lie side by side, in a slot and at rest."""

    state: TensorSpec
    parts: tuple[TensorSpec, ...]
    """What rests of it."""
    num_layers: int
    start: int
    stride: int
    """Bytes from layer to layer in a slot."""
    rest_start: int
    rest_stride: int

    def slot_LM(self, slot_X: Tensor) -> Tensor:
        """Return its view of a slot."""
        return _view(slot_X, self.state, self.num_layers, self.start, self.stride)

    def rest_LM(self, rest_X: Tensor) -> list[Tensor]:
        """Return the views of its parts at rest."""
        starts = accumulate(map(state_bytes, self.parts[:-1]), initial=self.rest_start)
        pairs = zip(self.parts, starts, strict=True)
        return [_view(rest_X, part, self.num_layers, start, self.rest_stride) for part, start in pairs]


class InFewerBits:
    """The recurrent states of a slot are stored in fewer bits.

    Args:
        spec: spec of the slots.
        dtype: ``bfloat16`` or ``int8``.
    """

    def __init__(self, spec: ModelSpec, dtype: str) -> None:
        self._spec = spec
        self._rest = spec.stored(dtype)
        self._runs = tuple(_runs(spec.layers, self._rest.layers, dtype))

    def encode(self, entry_X: Tensor) -> Tensor:
        rest_X = self.room(entry_X)
        for run in self._runs:
            _encode(run.slot_LM(entry_X), *run.rest_LM(rest_X))
        rest_X[self._rest.hidden_offset :].copy_(entry_X[self._spec.hidden_offset :])
        return rest_X

    def num_bytes(self, entry_X: Tensor) -> int:
        return self._rest.raw_slot_bytes

    def room(self, entry_X: Tensor) -> Tensor:
        return entry_X.new_empty(self._rest.raw_slot_bytes)

    def decode(self, rest_X: Tensor, entry_X: Tensor) -> None:
        for run in self._runs:
            _decode(run.slot_LM(entry_X), *run.rest_LM(rest_X))
        entry_X[self._spec.hidden_offset :].copy_(rest_X[self._rest.hidden_offset :])


def slot_encoding(spec: ModelSpec, dtype: str) -> Encoding:
    """Return the encoding of slots for a snapshot dtype."""
    return AS_IS if spec.stored(dtype) == spec else InFewerBits(spec, dtype)


def _encode(state_LM: Tensor, codes_LM: Tensor, scale_LM: Tensor | None = None) -> None:
    """Write a state in fewer bits, without waiting for it."""
    if scale_LM is not None:
        scratch_LM = state_LM.abs().nan_to_num_(nan=0.0, posinf=0.0)
        scale_LM.copy_(scratch_LM.amax(-1).mul_(1 / MAX_CODE).clamp_(MIN_SCALE, MAX_SCALE))
        torch.div(state_LM, scale_LM.unsqueeze(-1), out=scratch_LM)
        unknown = float(NOT_FINITE)
        codes_LM.copy_(scratch_LM.round_().nan_to_num_(nan=unknown, posinf=unknown, neginf=unknown))
    elif codes_LM.dtype == torch.bfloat16 != state_LM.dtype:
        within_LM = state_LM.clamp(-MAX_BFLOAT16, MAX_BFLOAT16)
        codes_LM.copy_(torch.where(state_LM.isinf(), state_LM, within_LM))
    else:
        codes_LM.copy_(state_LM)


def _decode(state_LM: Tensor, codes_LM: Tensor, scale_LM: Tensor | None = None) -> None:
    """Write a state from its encoded parts."""
    state_LM.copy_(codes_LM)
    if scale_LM is not None:
        state_LM.masked_fill_(codes_LM == NOT_FINITE, float("nan")).mul_(scale_LM.unsqueeze(-1))


def _runs(layers: Sequence[LayerSpec], rest_layers: Sequence[LayerSpec], dtype: str) -> Iterator[_Run]:
    """Yield the states of all layers, equal layers side by side together."""
    start = rest_start = 0
    with_states = [pair for pair in zip(layers, rest_layers, strict=True) if pair[0].states]
    for states, group in groupby(with_states, key=lambda pair: pair[0].states):
        alike = list(group)
        stride, rest_stride = alike[0][0].slot_bytes, alike[0][1].slot_bytes
        offset, rest_offset = start, rest_start
        for state in states:
            parts = state.stored(dtype)
            yield _Run(state, parts, len(alike), offset, stride, rest_offset, rest_stride)
            offset += state_bytes(state)
            rest_offset += sum(map(state_bytes, parts))
        start += len(alike) * stride
        rest_start += len(alike) * rest_stride


def _view(bytes_X: Tensor, tensor: TensorSpec, num_layers: int, start: int, stride: int) -> Tensor:
    """Return the typed view of a tensor of several layers, ``stride`` bytes apart."""
    layers_LX = bytes_X.as_strided((num_layers, tensor.num_bytes), (stride, 1), bytes_X.storage_offset() + start)
    view_LM: Tensor = layers_LX.view(getattr(torch, tensor.dtype)).unflatten(-1, tensor.shape)
    return view_LM
