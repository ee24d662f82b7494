"""The device memory of blocks and slots: one tensor of bytes, and typed views of it for every layer.

Slot ``s`` starts at byte ``s * slab_bytes``, block ``b`` at byte ``b * block_bytes``, window block ``w`` at ``w`` times
the stride of its size; these ranges overlap, and the allocators of ids keep them apart. A block holds stream after
stream, layer after layer; a slot holds state after state, layer after layer, then the final hidden state. One block or
one slot is one contiguous range. Only a tensor's layer interprets its name.

Invariants: a view never copies; the null block and the null slot are never written here.

Shape suffixes: B blocks, L layers of a run of equal ones, I equal streams side by side in a layer, P tokens in a block,
S slots, J rows of drafts, E hidden size; X stands for the further dimensions of any tensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod

import numpy as np
import torch
from torch import Tensor

from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK, NULL_SLOT, PATH, BlockId, Lifetime, SlotId
from strandline.specs import ALIGN_BYTES, LayerSpec, LogSpec, ModelSpec, TensorSpec, state_bytes, stream_bytes

NAN_BYTE = 0xFF
"""Memory filled with this byte reads as NaN in float32, bfloat16 and float16."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """One layer's tensors, by the names of its spec."""

    streams: Mapping[str, Tensor]
    """Strided over blocks: ``[blocks, BLOCK_TOKENS, *shape]``."""
    states: Mapping[str, Tensor]
    """Strided over slots: ``[slots, *shape]``. Slot 0 reads as zeros: it is neither read nor written."""
    log: Mapping[str, Tensor] | None
    """``[logs, *shape]``. None: no log is kept."""
    draft_log: Mapping[str, Tensor] | None = None
    """``[logs * draft tokens, *shape]``: the drafts of log ``j`` begin at row ``j * draft tokens``. None: there are
    none."""
    lifetime: Lifetime = PATH
    """Which blocks hold the streams."""


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Equal layers that keep logs: their tensors, with a leading dimension for the layer."""

    layers: tuple[int, ...]
    """Their indices in the model."""
    states: Mapping[str, Tensor]
    log: Mapping[str, Tensor]

    def part(self, start: int, end: int) -> "LayerStack":
        """Return the stack of layers ``[start, end)`` of this one."""
        states, log = ({name: view[start:end] for name, view in x.items()} for x in (self.states, self.log))
        return LayerStack(self.layers[start:end], states, log)


class ArenaTensors:
    """One allocation of ``num_slabs * spec.slab_bytes`` bytes, zeroed, and the views that layers work on.

    Logs, including the null log, are allocated separately and are not part of snapshots: ``num_logs`` of decoded
    tokens, and ``num_draft_logs`` of the inputs of ``draft_tokens`` drafts each. A sequence's logs of both kinds have
    the same id.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_slabs: int,
        device: torch.device | str = "cpu",
        *,
        num_logs: int = 0,
        num_draft_logs: int = 0,
        draft_tokens: int = 0,
    ) -> None:
        self.spec = spec
        self.num_slabs = num_slabs
        self.num_blocks = num_slabs * spec.blocks_per_slab
        self.bytes = _zeros(num_slabs * spec.slab_bytes, torch.device(device))
        self._block_offsets = _block_offsets(spec)
        self._slot_offsets = [0, *accumulate(layer.slot_bytes for layer in spec.layers)]
        self._stream_runs = {lifetime: tuple(self._runs_of_streams(lifetime)) for lifetime in spec.lifetimes}
        self.draft_tokens = draft_tokens
        self._num_draft_rows = num_draft_logs * draft_tokens
        self.stacks = tuple(self._stacked_layers(num_logs)) if num_logs else ()
        """The layers that keep logs, as stacks of equal ones."""
        self.layers: tuple[LayerMemory, ...] = tuple(self._layer_views())
        """Per layer of the model, its share of all blocks and of all slots."""
        self.hidden_SE = self._view(
            spec.hidden_dtype, (num_slabs, spec.hidden_size), spec.slab_bytes, spec.hidden_offset
        )
        """Per slot, the final hidden state of the last token that a snapshot covers."""
        self.hidden_drafts_JE = self._new_hidden_drafts()
        """The final hidden states of drafts, in the rows of ``LayerMemory.draft_log``; None: no slot will need them."""

    def prefault(self, num_bytes: int) -> None:
        """Prefault the first bytes on a CPU. They must not have been written yet."""
        self.bytes[:num_bytes].numpy().fill(0)

    def block(self, block: BlockId, lifetime: Lifetime = PATH) -> Tensor:
        """Return the bytes of one block."""
        if lifetime != PATH:
            start = block * self.spec.window_strides_bytes[lifetime - 1]
            return self.bytes[start : start + self.spec.window_sizes[lifetime - 1].block_bytes]
        start = block * self.spec.block_bytes
        return self.bytes[start : start + self.spec.raw_block_bytes]

    def slot(self, slot: SlotId) -> Tensor:
        """Return the bytes of one slot."""
        start = slot * self.spec.slab_bytes
        return self.bytes[start : start + self.spec.raw_slot_bytes]

    def copy_block(self, src: BlockId, dst: BlockId, num_tokens: int, lifetime: Lifetime = PATH) -> None:
        """Copy the first ``num_tokens`` tokens of a block, in all streams that have them in such blocks."""
        if NULL_BLOCK in (src, dst) or not 0 < num_tokens <= BLOCK_TOKENS:
            raise CacheInvariantError(f"asked to copy {num_tokens} tokens of block {src} to block {dst}")
        for run_BLIPX in self._stream_runs[lifetime]:
            run_BLIPX[dst, :, :, :num_tokens].copy_(run_BLIPX[src, :, :, :num_tokens])

    def move_block(self, src: BlockId, dst: BlockId, lifetime: Lifetime = PATH) -> None:
        """Copy a whole block; the old one keeps its bytes."""
        if NULL_BLOCK in (src, dst):
            raise CacheInvariantError(f"asked to move block {src} to block {dst}")
        self.block(dst, lifetime).copy_(self.block(src, lifetime))

    def poison(self, blocks: Iterable[BlockId], slots: Iterable[SlotId], lifetime: Lifetime = PATH) -> None:
        """Fill blocks and slots with NaN, so that reads of free or unwritten memory are detected."""
        for block in blocks:
            if block == NULL_BLOCK:
                raise CacheInvariantError("asked to poison the null block")
            self.block(block, lifetime).fill_(NAN_BYTE)
        for slot in slots:
            if slot == NULL_SLOT:
                raise CacheInvariantError("asked to poison the null slot")
            self.slot(slot).fill_(NAN_BYTE)

    def _layer_views(self) -> Iterator[LayerMemory]:
        logs = {
            layer: {name: log[row] for name, log in stack.log.items()}
            for stack in self.stacks
            for row, layer in enumerate(stack.layers)
        }
        for index, layer in enumerate(self.spec.layers):
            streams, states = self._stream_views(layer, index), self._state_views(layer, index)
            lifetime = self.spec.lifetime_of(layer)
            yield LayerMemory(streams, states, logs.get(index), self._new_draft_log(layer), lifetime)

    def _stream_views(self, layer: LayerSpec, index: int) -> dict[str, Tensor]:
        offset, views = self._block_offsets[index], {}
        num_blocks, block_bytes = self._blocks_of(layer)
        for stream in layer.streams:
            shape = (num_blocks, BLOCK_TOKENS, *stream.shape)
            views[stream.name] = self._view(stream.dtype, shape, block_bytes, offset)
            offset += stream_bytes(stream)
        return views

    def _blocks_of(self, layer: LayerSpec) -> tuple[int, int]:
        """Return the number of the blocks that hold a layer's streams, and the stride from one to the next."""
        lifetime = self.spec.lifetime_of(layer)
        if lifetime == PATH:
            return self.num_blocks, self.spec.block_bytes
        num_blocks = self.num_slabs * self.spec.window_blocks_per_slab[lifetime - 1]
        return num_blocks, self.spec.window_strides_bytes[lifetime - 1]

    def _state_views(self, layer: LayerSpec, index: int) -> dict[str, Tensor]:
        offset, views = self._slot_offsets[index], {}
        for state in layer.states:
            views[state.name] = self._view(state.dtype, (self.num_slabs, *state.shape), self.spec.slab_bytes, offset)
            offset += state_bytes(state)
        return views

    def _runs_of_streams(self, lifetime: int) -> Iterator[Tensor]:
        """Yield ``run_BLIPX`` of equal streams that lie side by side, in each of several equal layers."""
        with_streams = [
            (index, layer.streams)
            for index, layer in enumerate(self.spec.layers)
            if layer.streams and self.spec.lifetime_of(layer) == lifetime
        ]
        for streams, group in groupby(with_streams, key=lambda pair: pair[1]):
            indices = [index for index, _ in group]
            first_layer = self.spec.layers[indices[0]]
            offset, layer_bytes = self._block_offsets[indices[0]], first_layer.block_bytes
            num_blocks, block_bytes = self._blocks_of(first_layer)
            for (shape, dtype), equal in groupby(streams, key=lambda stream: (stream.shape, stream.dtype)):
                side_by_side = list(equal)
                between = stream_bytes(side_by_side[0])
                first_BPX = self._view(dtype, (num_blocks, BLOCK_TOKENS, *shape), block_bytes, offset)
                run_BIPX = _repeated(first_BPX, 1, len(side_by_side), between)
                yield _repeated(run_BIPX, 1, len(indices), layer_bytes)
                offset += between * len(side_by_side)

    def _stacked_layers(self, num_logs: int) -> Iterator[LayerStack]:
        with_states = [(index, layer) for index, layer in enumerate(self.spec.layers) if layer.states]
        for (_, log), group in groupby(with_states, key=lambda pair: (pair[1].states, pair[1].log)):
            if log is None:
                continue
            run = list(group)
            first, layer = run[0]
            states = {
                name: _repeated(view, 0, len(run), layer.slot_bytes)
                for name, view in self._state_views(layer, first).items()
            }
            yield LayerStack(tuple(index for index, _ in run), states, self._new_logs(log, len(run), num_logs))

    def _new_logs(self, log: LogSpec, num_layers: int, num_logs: int) -> dict[str, Tensor]:
        return {tensor.name: self._new_log(tensor, num_layers, num_logs) for tensor in log.tensors}

    def _new_draft_log(self, layer: LayerSpec) -> dict[str, Tensor] | None:
        if not self._num_draft_rows or not layer.draft_log:
            return None
        return {tensor.name: self._new_log(tensor, 1, self._num_draft_rows)[0] for tensor in layer.draft_log}

    def _new_hidden_drafts(self) -> Tensor | None:
        if not self._num_draft_rows or not self.spec.has_states:
            return None
        hidden = TensorSpec("hidden", (self.spec.hidden_size,), self.spec.hidden_dtype)
        return self._new_log(hidden, 1, self._num_draft_rows)[0]

    def _new_log(self, tensor: TensorSpec, num_layers: int, num_logs: int) -> Tensor:
        filled = _zeros(num_layers * num_logs * tensor.num_bytes, self.bytes.device)
        return filled.view(getattr(torch, tensor.dtype)).view(num_layers, num_logs, *tensor.shape)

    def _view(self, dtype_name: str, shape: tuple[int, ...], stride_bytes: int, offset_bytes: int) -> Tensor:
        """Return ``shape[0]`` dense tensors of ``shape[1:]``, ``stride_bytes`` apart, as one strided tensor."""
        typed = self.bytes.view(getattr(torch, dtype_name))
        item = typed.element_size()
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        strides[0] = stride_bytes // item
        return typed.as_strided(shape, strides, offset_bytes // item)


def _block_offsets(spec: ModelSpec) -> list[int]:
    """Return where the streams of each layer begin in the blocks that hold them."""
    ends, offsets = [0 for _ in spec.lifetimes], list[int]()
    for layer in spec.layers:
        lifetime = spec.lifetime_of(layer)
        offsets.append(ends[lifetime])
        ends[lifetime] += layer.block_bytes
    return offsets


def _repeated(view: Tensor, axis: int, count: int, stride_bytes: int) -> Tensor:
    """Return a view with a new dimension: ``count`` views like this one, ``stride_bytes`` apart."""
    shape, strides = list(view.shape), list(view.stride())
    shape.insert(axis, count)
    strides.insert(axis, stride_bytes // view.element_size())
    return view.as_strided(shape, strides, view.storage_offset())


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate zeroed bytes; on a CPU the system backs them with memory when they are first used.

    There a library's sums may depend on how its inputs are aligned, so that all arenas are aligned alike.
    """
    if device.type == "cpu":
        spacious = np.zeros(num_bytes + ALIGN_BYTES, dtype=np.uint8)
        first = -spacious.ctypes.data % ALIGN_BYTES
        return torch.from_numpy(spacious[first : first + num_bytes])
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
