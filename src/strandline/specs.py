"""What one layer keeps between tokens, in bytes, and what follows from it for blocks and slots.

A model declares one spec per layer; every size in the engine is derived from these. Pure Python: dtypes are
named by strings so that the cache and the replay tools need no tensor library.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Final

from strandline.ids import BLOCK_TOKENS

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

ALIGN_BYTES: Final = 256
"""Every tensor in a block or slot starts on this boundary, so that vector loads and typed views are legal."""


def align(num_bytes: int) -> int:
    """Round up to a multiple of ``ALIGN_BYTES``."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A softmax-attention layer: keys and values of every token, ``[num_kv_heads, head_dim]`` each."""

    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def kv_bytes(self) -> int:
        """Bytes of one block's keys (and of its values), aligned."""
        return align(BLOCK_TOKENS * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class LogSpec:
    """What a recurrent layer can keep of a token before it is folded into the state, in float32.

    A key for each of its ``num_keys`` key heads, a value for each head of the state, and the decay up to there.
    """

    num_tokens: int
    """Most tokens before a fold."""
    num_keys: int

    def shapes(self, state_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one log's keys, values and decays."""
        num_heads, key_dim, value_dim = state_shape
        return (
            (self.num_keys, self.num_tokens, key_dim),
            (num_heads, self.num_tokens, value_dim),
            (num_heads, self.num_tokens),
        )


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A recurrent layer: a state of any shape, and the last inputs of its short convolution."""

    state_shape: tuple[int, ...]
    state_dtype: str
    window_shape: tuple[int, int]
    """``[conv_width - 1, channels]``: token-major, oldest first."""
    window_dtype: str
    log: LogSpec | None = field(default=None, compare=False)
    """None: every token is folded into the state at once. No size depends on it: specs that differ here are equal."""

    @property
    def state_bytes(self) -> int:
        return align(prod(self.state_shape) * ITEM_BYTES[self.state_dtype])

    @property
    def window_bytes(self) -> int:
        return align(prod(self.window_shape) * ITEM_BYTES[self.window_dtype])


LayerSpec = AttentionSpec | RecurrentSpec


@dataclass(frozen=True)
class ModelSpec:
    """All layers of a model in order, and the size of the final hidden state that a snapshot carries."""

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    hidden_dtype: str

    @cached_property
    def raw_block_bytes(self) -> int:
        """Bytes of one block: keys then values, layer after layer."""
        total = sum(2 * layer.kv_bytes for layer in self.layers if isinstance(layer, AttentionSpec))
        return max(total, ALIGN_BYTES)

    @cached_property
    def raw_slot_bytes(self) -> int:
        """Bytes of one slot: state then window, layer after layer, then the hidden state."""
        return self.hidden_offset + align(self.hidden_size * ITEM_BYTES[self.hidden_dtype])

    @cached_property
    def hidden_offset(self) -> int:
        """Where in a slot the final hidden state of the last token lies, in bytes."""
        return sum(layer.state_bytes + layer.window_bytes for _, layer in self.recurrent_layers())

    @cached_property
    def blocks_per_slab(self) -> int:
        """How many blocks fill one slab (the room of one slot)."""
        return max(1, -(-self.raw_slot_bytes // self.block_bytes))

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
        """Most tokens that all recurrent layers can keep before a fold; 0: one of them keeps no log."""
        logs = [layer.log for _, layer in self.recurrent_layers()]
        return min((log.num_tokens if log else 0 for log in logs), default=0)

    @cached_property
    def log_bytes(self) -> int:
        """Bytes of one running sequence's log, where logs are kept."""
        return sum(
            ITEM_BYTES["float32"] * sum(map(prod, layer.log.shapes(layer.state_shape)))
            for _, layer in self.recurrent_layers()
            if layer.log
        )

    def recurrent_layers(self) -> Iterator[tuple[int, RecurrentSpec]]:
        """Layer index and spec of each recurrent layer, in order."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, RecurrentSpec):
                yield index, layer

    def attention_layers(self) -> Iterator[tuple[int, AttentionSpec]]:
        """Layer index and spec of each attention layer, in order."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, AttentionSpec):
                yield index, layer
