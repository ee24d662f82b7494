"""The device memory of blocks and slots: one tensor of bytes, and typed views of it for every layer.

Slot ``s`` starts at byte ``s * slab_bytes``, block ``b`` at byte ``b * block_bytes``; both ranges overlap, and
whoever hands out the ids keeps them apart. In a block lie keys then values, layer after layer; in a slot lie state
then window, layer after layer, then the final hidden state. One block or one slot is one contiguous range.

Invariants: a view never copies; the null block and the null slot are never written here.

Shape suffixes: B blocks, L keys and values of a run of equal layers (2 per layer), P tokens in a block, G key/value
heads, D head dim, S slots, R rows of a convolution window, C channels, E hidden size.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from math import prod

import numpy as np
import torch
from torch import Tensor

from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK, NULL_SLOT, BlockId, SlotId
from strandline.kernels.batch import KVMemory, LayerMemory, LoggedLayers, LogMemory, RecurrentMemory
from strandline.specs import AttentionSpec, ModelSpec, RecurrentSpec

NAN_BYTE = 0xFF
"""Memory filled with this byte reads as NaN in float32, bfloat16 and float16."""


class ArenaTensors:
    """One allocation of ``num_slabs * spec.slab_bytes`` bytes, zeroed, and the views that layers work on.

    Beside it lie ``num_logs`` logs, the null log included, which no snapshot takes along; 0: none are kept.
    """

    def __init__(
        self, spec: ModelSpec, num_slabs: int, device: torch.device | str = "cpu", *, num_logs: int = 0
    ) -> None:
        self.spec = spec
        self._num_logs = num_logs
        self.num_slabs = num_slabs
        self.num_blocks = num_slabs * spec.blocks_per_slab
        self.bytes = _zeros(num_slabs * spec.slab_bytes, torch.device(device))
        self._kv_runs = [self._kv_run(offset, run) for offset, run in _runs_of_equal_layers(spec)]
        """``kv_BLPGD`` of each run of attention layers with one shape."""
        self.logged_layers = tuple(self._logged_layers()) if num_logs else ()
        """Each run of equal recurrent layers, with its logs."""
        self.layers: tuple[LayerMemory, ...] = tuple(self._layer_views())
        """Per layer of the model, its share of all blocks or of all slots."""
        self.hidden_SE = self._view(
            spec.hidden_dtype, (num_slabs, spec.hidden_size), spec.slab_bytes, spec.hidden_offset
        )
        """Per slot, the final hidden state of the last token that a snapshot covers."""

    def touch(self, num_bytes: int) -> None:
        """Have the system hand out the pages of the first bytes on a CPU; nobody may have written to them yet."""
        self.bytes[:num_bytes].numpy().fill(0)

    def block(self, block: BlockId) -> Tensor:
        """Return the bytes of one block."""
        start = block * self.spec.block_bytes
        return self.bytes[start : start + self.spec.raw_block_bytes]

    def slot(self, slot: SlotId) -> Tensor:
        """Return the bytes of one slot."""
        start = slot * self.spec.slab_bytes
        return self.bytes[start : start + self.spec.raw_slot_bytes]

    def copy_block(self, src: BlockId, dst: BlockId, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` tokens of a block: keys and values of all layers, and nothing else."""
        if NULL_BLOCK in (src, dst) or not 0 < num_tokens <= BLOCK_TOKENS:
            raise CacheInvariantError(f"asked to copy {num_tokens} tokens of block {src} to block {dst}")
        for kv_BLPGD in self._kv_runs:
            kv_BLPGD[dst, :, :num_tokens].copy_(kv_BLPGD[src, :, :num_tokens])

    def move_block(self, src: BlockId, dst: BlockId) -> None:
        """Copy a whole block; the old place keeps its bytes."""
        if NULL_BLOCK in (src, dst):
            raise CacheInvariantError(f"asked to move block {src} to block {dst}")
        self.block(dst).copy_(self.block(src))

    def poison(self, blocks: Iterable[BlockId], slots: Iterable[SlotId]) -> None:
        """Fill blocks and slots with NaN, so that whoever reads what is free or unwritten is found out."""
        for block in blocks:
            if block == NULL_BLOCK:
                raise CacheInvariantError("asked to poison the null block")
            self.block(block).fill_(NAN_BYTE)
        for slot in slots:
            if slot == NULL_SLOT:
                raise CacheInvariantError("asked to poison the null slot")
            self.slot(slot).fill_(NAN_BYTE)

    def _layer_views(self) -> Iterator[LayerMemory]:
        kv_views = (view for run in self._kv_runs for view in run.unbind(1))
        slot_offset = 0
        logs = (run.logs.of_layer(index) for run in self.logged_layers for index in range(len(run.state_RSHKV)))
        for layer in self.spec.layers:
            if isinstance(layer, AttentionSpec):
                yield KVMemory(next(kv_views), next(kv_views))
            else:
                yield self._recurrent_views(layer, slot_offset, next(logs, None))
                slot_offset += layer.state_bytes + layer.window_bytes

    def _recurrent_views(self, layer: RecurrentSpec, offset: int, log: LogMemory | None) -> RecurrentMemory:
        state_shape = (self.num_slabs, *layer.state_shape)
        window_shape = (self.num_slabs, *layer.window_shape)
        stride = self.spec.slab_bytes
        return RecurrentMemory(
            self._view(layer.state_dtype, state_shape, stride, offset),
            self._view(layer.window_dtype, window_shape, stride, offset + layer.state_bytes),
            log,
        )

    def _logged_layers(self) -> Iterator[LoggedLayers]:
        offset = 0
        for layer, group in groupby(layer for _, layer in self.spec.recurrent_layers()):
            num_layers = len(list(group))
            layer_bytes = layer.state_bytes + layer.window_bytes
            first_SHKV = self._view(
                layer.state_dtype, (self.num_slabs, *layer.state_shape), self.spec.slab_bytes, offset
            )
            strides = (layer_bytes // first_SHKV.element_size(), *first_SHKV.stride())
            state_RSHKV = first_SHKV.as_strided((num_layers, *first_SHKV.shape), strides, first_SHKV.storage_offset())
            assert layer.log is not None
            tensors = (
                _zeros(num_layers * self._num_logs * prod(shape) * torch.float32.itemsize, self.bytes.device)
                .view(torch.float32)
                .view(num_layers, self._num_logs, *shape)
                for shape in layer.log.shapes(layer.state_shape)
            )
            yield LoggedLayers(state_RSHKV, LogMemory(*tensors))
            offset += num_layers * layer_bytes

    def _kv_run(self, offset: int, run: list[AttentionSpec]) -> Tensor:
        layer = run[0]
        inner = (BLOCK_TOKENS, layer.num_kv_heads, layer.head_dim)
        first = self._view(layer.dtype, (self.num_blocks, *inner), self.spec.block_bytes, offset)
        shape = (self.num_blocks, 2 * len(run), *inner)
        between = layer.kv_bytes // first.element_size()
        return first.as_strided(shape, (first.stride(0), between, *first.stride()[1:]), first.storage_offset())

    def _view(self, dtype_name: str, shape: tuple[int, ...], stride_bytes: int, offset_bytes: int) -> Tensor:
        """Return ``shape[0]`` dense tensors of ``shape[1:]``, ``stride_bytes`` apart, as one strided tensor."""
        typed = self.bytes.view(getattr(torch, dtype_name))
        item = typed.element_size()
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        strides[0] = stride_bytes // item
        return typed.as_strided(shape, strides, offset_bytes // item)


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate zeroed bytes; on a CPU the system hands the pages out when they are first touched."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _runs_of_equal_layers(spec: ModelSpec) -> Iterator[tuple[int, list[AttentionSpec]]]:
    """Yield byte offset and layers of each run of equal attention layers in a block."""
    offset = 0
    for _, group in groupby(layer for _, layer in spec.attention_layers()):
        run = list(group)
        yield offset, run
        offset += sum(2 * layer.kv_bytes for layer in run)
