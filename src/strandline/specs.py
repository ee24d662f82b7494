"""Tensors that layers keep between tokens, and the block and slot sizes derived from them.

A model declares one spec per layer; every size in the engine is derived from these. Only the layer interprets the
names. Pure Python: dtypes are named by strings so that the cache and the replay tools need no tensor library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Final, NamedTuple

from strandline.ids import BLOCK_TOKENS, PATH, Lifetime

E4M3: Final = "float8_e4m3fn"
"""The dtype of keys and values that are kept in FP8."""

ITEM_BYTES: Final = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    E4M3: 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

SNAPSHOT_DTYPES: Final = ("float32", "bfloat16", "int8")
"""Dtypes of recurrent states in host memory and on disk. Only the first one is exact."""

ALIGN_BYTES: Final = 256
"""Every tensor in a block or slot starts on this boundary, so that vector loads and typed views are legal."""


def align(num_bytes: int) -> int:
    """Round up to a multiple of ``ALIGN_BYTES``."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """What is recorded of a token: for each layer of the model, the numbers of its experts, the best one first."""

    num_layers: int
    """All layers; those without experts have zeros."""
    top_k: int
    num_experts: int
    """Numbers are less than this."""

    @property
    def item_bytes(self) -> int:
        """Bytes of a number: unsigned, in the machine's order."""
        return 1 if self.num_experts <= 256 else 2

    @property
    def num_bytes(self) -> int:
        """Bytes of a token."""
        return self.num_layers * self.top_k * self.item_bytes


class Part(NamedTuple):
    """A range of a tensor along one dimension that ranks divide among them."""

    size: int
    """Size of the part on each rank."""
    num_shares: int
    """Number of shares. If there are fewer shares than ranks, neighbouring ranks hold the same one."""


@dataclass(frozen=True, slots=True)
class Division:
    """How ranks divide a tensor: parts along one dimension, each divided separately."""

    dim: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named tensor that a layer keeps per token, per sequence or per log."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_recurrent: bool = False
    """Whether a state is computed from the previous one rather than copied from inputs, so that rounding
    accumulates."""
    division: Division | None = field(default=None, compare=False)
    """How ranks divide a stream or state; None: every rank holds all of it."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def whole(self) -> "TensorSpec":
        """The spec of the whole tensor, over all ranks."""
        if self.division is None:
            return self
        shape = list(self.shape)
        shape[self.division.dim] = sum(part.size * part.num_shares for part in self.division.parts)
        return replace(self, shape=tuple(shape), division=None)

    def divided(self, *parts: tuple[int, int], dim: int = 0) -> "TensorSpec":
        """Return the spec of one rank's share of a tensor that ranks divide.

        Args:
            parts: the size here, and the number of shares, of each part along the dimension.
        """
        return replace(self, division=Division(dim, tuple(Part(*part) for part in parts)))

    def stored(self, dtype: str) -> "tuple[TensorSpec, ...]":
        """Return the tensors that store a state in host memory and on disk: itself, or a recurrent state in fewer bits.

        In int8 these are the codes and a scale for all values along the last dimension, usually one per head and key
        channel. A one-dimensional state is stored in bfloat16 instead.

        Args:
            dtype: one of ``SNAPSHOT_DTYPES``.
        """
        if dtype == "float32" or not self.is_recurrent or self.dtype != "float32":
            return (self,)
        if dtype == "bfloat16" or len(self.shape) == 1:
            return (TensorSpec(self.name, self.shape, "bfloat16"),)
        return TensorSpec(self.name, self.shape, "int8"), TensorSpec(f"{self.name}_scale", self.shape[:-1], "float32")


@dataclass(frozen=True, slots=True)
class LogSpec:
    """The tensors that a layer keeps for tokens that are not folded into its states yet."""

    num_tokens: int
    """Maximum number of tokens before a fold."""
    tensors: tuple[TensorSpec, ...]
    """Each holds ``num_tokens`` tokens."""

    @classmethod
    def of(cls, num_tokens: int, shapes: Mapping[str, tuple[int, ...]]) -> "LogSpec":
        """Return the spec of float32 tensors."""
        return cls(num_tokens, tuple(TensorSpec(name, shape, "float32") for name, shape in shapes.items()))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The tensors that one layer keeps; none for a layer without memory."""

    streams: tuple[TensorSpec, ...] = ()
    """Kept for every token (keys, values, a latent), in blocks; the shapes are per token."""
    states: tuple[TensorSpec, ...] = ()
    """Kept for every sequence (a recurrent state, the last inputs of a convolution), in slots."""
    log: LogSpec | None = field(default=None, compare=False)
    """None: every token is folded into the states at once. Blocks and slots do not depend on the log, and specs that
    differ only here compare equal."""
    draft_log: tuple[TensorSpec, ...] = field(default=(), compare=False)
    """Inputs of one token that the states are computed from, kept for drafts so that accepted ones can be folded into
    the states later. Empty: the layer has no states, or cannot compute drafts."""
    window_tokens: int | None = field(default=None, compare=False)
    """Number of last tokens whose streams a token reads, itself included; None: all tokens before it."""

    @property
    def block_bytes(self) -> int:
        """Bytes of the layer's streams in one block."""
        return sum(map(stream_bytes, self.streams))

    @property
    def slot_bytes(self) -> int:
        """Bytes of the layer's states in one slot."""
        return sum(map(state_bytes, self.states))

    @property
    def is_recurrent(self) -> bool:
        """Whether one of the states is."""
        return any(state.is_recurrent for state in self.states)

    @property
    def whole(self) -> "LayerSpec":
        """The spec of the whole layer, over all ranks."""
        streams, states = tuple(x.whole for x in self.streams), tuple(x.whole for x in self.states)
        return LayerSpec(streams, states, window_tokens=self.window_tokens)

    def stored(self, dtype: str) -> "LayerSpec":
        """Return the spec in host memory and on disk: states as in ``TensorSpec.stored``, streams unchanged."""
        states = tuple(part for state in self.states for part in state.stored(dtype))
        return LayerSpec(self.streams, states, window_tokens=self.window_tokens)


def stream_bytes(stream: TensorSpec) -> int:
    """Return the bytes of one block's share of a stream, aligned."""
    return align(BLOCK_TOKENS * stream.num_bytes)


def state_bytes(state: TensorSpec) -> int:
    """Return the bytes of one slot's share of a state, aligned."""
    return align(state.num_bytes)


def kv_spec(num_heads: int, head_dim: int, dtype: str, *, num_shares: int = 1) -> LayerSpec:
    """Return the spec of softmax attention: streams ``key`` and ``value``, ``[num_heads, head_dim]`` each.

    Args:
        num_shares: number of shares, of ``num_heads`` each, that ranks divide all heads into.
    """
    key, value = (TensorSpec(name, (num_heads, head_dim), dtype) for name in ("key", "value"))
    return LayerSpec((key.divided((num_heads, num_shares)), value.divided((num_heads, num_shares))))


class WindowSize(NamedTuple):
    """What layers with windows of one size store."""

    num_tokens: int
    """Last tokens whose streams are stored."""
    block_bytes: int
    """Bytes of a window block of these layers."""

    def num_blocks_before(self, position: int) -> int:
        """Return how many window blocks a snapshot at a position has."""
        first = max(position - self.num_tokens + 1, 0) // BLOCK_TOKENS
        return -(-position // BLOCK_TOKENS) - first

    @property
    def max_blocks(self) -> int:
        """The most window blocks of a snapshot."""
        return (self.num_tokens + 2 * BLOCK_TOKENS - 3) // BLOCK_TOKENS


def _window_blocks_in(slab_bytes: int, window: WindowSize) -> int:
    """Return the most window blocks that divide a slab evenly, at aligned addresses."""
    most = slab_bytes // window.block_bytes
    return next(count for count in range(most, 0, -1) if slab_bytes % (count * ALIGN_BYTES) == 0)


class SnapshotSize(NamedTuple):
    """Memory that snapshots take in host memory and on disk, where a block of a path is the unit."""

    slot_bytes: int
    """Bytes of its slot; 0: the model keeps no states."""
    block_bytes: int
    """Bytes of a block of a path."""
    windows: tuple[WindowSize, ...] = ()

    def bytes_at(self, position: int) -> int:
        """Return the bytes of a snapshot at a position: near the start of a prompt, windows are shorter."""
        num_bytes = self.slot_bytes
        for window in self.windows:  # ``sum`` takes three times as long, for every entry that eviction ranks
            num_bytes += window.num_blocks_before(position) * window.block_bytes
        return num_bytes

    def blocks_at(self, position: int) -> int:
        """Return how many blocks a snapshot at a position takes; 0: prompts resume without snapshots."""
        return -(-self.bytes_at(position) // self.block_bytes)

    @property
    def max_blocks(self) -> int:
        """The most blocks that a snapshot takes; 0: prompts resume without snapshots."""
        num_bytes = self.slot_bytes + sum(window.max_blocks * window.block_bytes for window in self.windows)
        return -(-num_bytes // self.block_bytes)

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """All sizes of snapshots, ascending; with windows, they repeat beyond the largest one."""
        past = max((window.num_tokens for window in self.windows), default=0) + 2 * BLOCK_TOKENS
        return tuple(sorted({self.bytes_at(position) for position in range(1, past)} - {0}))


@dataclass(frozen=True)
class ModelSpec:
    """All layers of a model in order, and the size of the final hidden state that a snapshot carries."""

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    hidden_dtype: str
    has_window_blocks: bool = False
    """Whether the streams of layers with windows are in *window blocks*, which are freed when the windows have passed
    them; else all streams are in the same blocks."""

    @property
    def has_windows(self) -> bool:
        """Whether the streams of a layer have a window."""
        return any(layer.streams and layer.window_tokens is not None for layer in self.layers)

    @property
    def needs_snapshots(self) -> bool:
        """Whether prefixes are resumed at snapshots: slots, windows or both."""
        return self.has_states or self.has_window_blocks

    def lifetime_of(self, layer: LayerSpec) -> Lifetime:
        """Return which blocks hold a layer's streams."""
        if not self.has_window_blocks or not layer.streams or layer.window_tokens is None:
            return PATH
        return Lifetime(1 + self._windows_tokens.index(layer.window_tokens))

    @cached_property
    def _windows_tokens(self) -> tuple[int, ...]:
        """The sizes of layers' windows, ascending."""
        sizes = (layer.window_tokens for layer in self.layers if layer.streams)
        return tuple(sorted({size for size in sizes if size is not None}))

    @property
    def lifetimes(self) -> range:
        """The lifetimes of blocks, that of paths first."""
        return range(1 + len(self.window_sizes))

    def _block_bytes_of(self, lifetime: Lifetime) -> int:
        return sum(layer.block_bytes for layer in self.layers if self.lifetime_of(layer) == lifetime)

    @cached_property
    def raw_block_bytes(self) -> int:
        """Bytes of one block: stream after stream, layer after layer; the least that is addressed if it holds none."""
        return max(self._block_bytes_of(PATH), ALIGN_BYTES)

    @cached_property
    def window_sizes(self) -> tuple[WindowSize, ...]:
        """The sizes of windows whose layers have window blocks, ascending, by lifetime.

        As many tokens are stored as these layers read. Without states one more, since the last token of a prompt that
        ends at a snapshot is computed again.
        """
        return tuple(
            WindowSize(num_tokens + (not self.has_states), self._block_bytes_of(Lifetime(number)))
            for number, num_tokens in enumerate(self._windows_tokens if self.has_window_blocks else (), 1)
        )

    @cached_property
    def raw_slot_bytes(self) -> int:
        """Bytes of one slot: state after state, layer after layer, then the hidden state."""
        return self.hidden_offset + align(self.hidden_size * ITEM_BYTES[self.hidden_dtype])

    @cached_property
    def hidden_offset(self) -> int:
        """Offset of the final hidden state of the last token in a slot, in bytes."""
        return sum(layer.slot_bytes for layer in self.layers)

    @cached_property
    def has_states(self) -> bool:
        """Whether a layer keeps states, so that a prefix is resumed from a slot and not from blocks alone."""
        return any(layer.states for layer in self.layers)

    @cached_property
    def blocks_per_slab(self) -> int:
        """Number of blocks in one slab, which is the size of one slot, or of window blocks if these are larger.

        Window blocks divide a slab evenly: of the sizes up to twice the smallest, the one whose slots and window
        blocks waste least.
        """
        largest = max((self.raw_slot_bytes, *(window.block_bytes for window in self.window_sizes)))
        least = max(1, -(-largest // self.block_bytes))
        return min(range(least, 2 * least + 1), key=self._wasted_share) if self.has_window_blocks else least

    def _wasted_share(self, num_blocks: int) -> float:
        """Return the share of a slab of this many blocks that window blocks do not use, or slots beyond the least.

        Of each size of windows, and added up.
        """
        slab_bytes, windows = num_blocks * self.block_bytes, self.window_sizes
        used_bytes = sum(_window_blocks_in(slab_bytes, window) * window.block_bytes for window in windows)
        return 1 + len(windows) - (used_bytes + self.raw_slot_bytes) / slab_bytes

    @cached_property
    def window_blocks_per_slab(self) -> tuple[int, ...]:
        """Number of window blocks in one slab, for each size of windows."""
        return tuple(_window_blocks_in(self.slab_bytes, window) for window in self.window_sizes)

    @property
    def num_null_blocks(self) -> int:
        """Blocks that are not allocated, at the start: the null blocks of all kinds are there."""
        return max((-(-self.blocks_per_slab // count) for count in self.window_blocks_per_slab), default=1)

    @cached_property
    def window_strides_bytes(self) -> tuple[int, ...]:
        """Stride from window block to window block, for each size of windows."""
        return tuple(self.slab_bytes // count for count in self.window_blocks_per_slab)

    @property
    def block_bytes(self) -> int:
        """Stride from block to block."""
        return self.raw_block_bytes

    @property
    def slab_bytes(self) -> int:
        """Stride from slot to slot: the slot's size, rounded up to a multiple of the block's."""
        return self.blocks_per_slab * self.block_bytes

    @cached_property
    def log_tokens(self) -> int:
        """Maximum number of tokens before a fold that all recurrent layers support; 0: one of them keeps no log."""
        return min((layer.log.num_tokens if layer.log else 0 for layer in self.layers if layer.is_recurrent), default=0)

    @property
    def can_log_drafts(self) -> bool:
        """Whether drafts can be computed: every layer with states keeps the inputs for them."""
        return all(layer.draft_log for layer in self.layers if layer.states)

    @cached_property
    def logged_draft_bytes(self) -> int:
        """Bytes of one draft token in a log: what all layers keep, and its final hidden state."""
        of_layers = sum(tensor.num_bytes for layer in self.layers for tensor in layer.draft_log)
        return of_layers + self.hidden_size * ITEM_BYTES[self.hidden_dtype] if self.has_states else 0

    @cached_property
    def log_bytes(self) -> int:
        """Bytes of one running sequence's log, where logs are kept."""
        return sum(layer.log.num_bytes for layer in self.layers if layer.log)

    @cached_property
    def whole(self) -> "ModelSpec":
        """The spec of blocks and slots of the model on one rank."""
        return replace(self, layers=tuple(layer.whole for layer in self.layers))

    def stored(self, dtype: str) -> "ModelSpec":
        """Return the spec of blocks and slots in host memory and on disk, with snapshots in this dtype."""
        return replace(self, layers=tuple(layer.stored(dtype) for layer in self.layers))

    def stored_snapshots(self, dtype: str) -> SnapshotSize:
        """Return what snapshots take in host memory and on disk: the slot in this dtype, if any, and the windows."""
        slot_bytes = self.stored(dtype).raw_slot_bytes if self.has_states else 0
        return SnapshotSize(slot_bytes, self.block_bytes, self.window_sizes)
