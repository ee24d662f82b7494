"""Cache events as other systems read them: msgpack in the schema of vLLM 0.33, an array of tagged maps.

Group 0 is the blocks, ``full_attention``; group 1 is the snapshots, ``mamba``. A hash travels as its last eight bytes,
an unsigned integer. The one field that is not vLLM's is ``position``, of group 1; readers of the schema ignore it.

Source of the schema: ``vllm/distributed/kv_events.py``.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from struct import Struct
from typing import Any, Final, assert_never

import msgspec

from strandline.ids import BLOCK_TOKENS
from strandline.records.cache_events import (
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    Cleared,
    SnapshotRemoved,
    SnapshotStored,
)
from strandline.records.tokens import TOKEN_BYTES, decode

BLOCK_GROUP: Final = 0
SNAPSHOT_GROUP: Final = 1
GPU: Final = "GPU"
WIRE_HASH_BYTES: Final = 8
WIRE_HASHES: Final = Struct(f">{sha256().digest_size - WIRE_HASH_BYTES}xQ")


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Blocks of group 0, or one snapshot."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    position: int | None = None
    """The exact number of tokens before a snapshot; None for blocks."""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Blocks of group 0, or snapshots, are gone."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Everything is gone."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of one message."""

    ts: float
    """Seconds since 1970, never less than in the message before."""
    events: list[WireEvent]
    data_parallel_rank: int | None = None


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(EventBatch)


def encode_batch(ts: float, events: Iterable[CacheEvent], rank: int = 0) -> bytes:
    """Return the payload of a message.

    Args:
        rank: the number of the engine among those of its server.
    """
    return _ENCODER.encode(EventBatch(ts, [to_wire(event) for event in events], rank))


def decode_batch(payload: bytes) -> EventBatch:
    """Return the batch in a message's payload.

    Raises:
        msgspec.MsgspecError: it holds something else.
    """
    return _DECODER.decode(payload)


def wire_hash(path_hash: bytes) -> int:
    """Return a hash as it travels."""
    return int.from_bytes(path_hash[-WIRE_HASH_BYTES:], "big")


def wire_hashes(path_hashes: Sequence[bytes]) -> list[int]:
    """Return hashes as they travel."""
    return [number for (number,) in WIRE_HASHES.iter_unpack(b"".join(path_hashes))]


def to_wire(event: CacheEvent) -> WireEvent:
    """Return an event in the schema of the wire."""
    match event:
        case BlocksStored(hashes, before, tokens):
            return _stored(hashes, before, tokens, BLOCK_TOKENS, BLOCK_GROUP, "full_attention")
        case SnapshotStored(path_hash, position, before, tokens):
            num_tokens = len(tokens) // TOKEN_BYTES
            return _stored((path_hash,), before, tokens, num_tokens, SNAPSHOT_GROUP, "mamba", position)
        case BlocksRemoved(hashes):
            return BlockRemoved(block_hashes=wire_hashes(hashes), medium=GPU, group_idx=BLOCK_GROUP)
        case SnapshotRemoved(path_hash):
            return BlockRemoved(block_hashes=[wire_hash(path_hash)], medium=GPU, group_idx=SNAPSHOT_GROUP)
        case Cleared():
            return AllBlocksCleared()
        case _:
            assert_never(event)


def _stored(
    hashes: tuple[bytes, ...],
    before: bytes | None,
    tokens: bytes,
    block_size: int,
    group: int,
    kind: str,
    position: int | None = None,
) -> BlockStored:
    return BlockStored(
        block_hashes=wire_hashes(hashes),
        parent_block_hash=None if before is None else wire_hash(before),
        token_ids=decode(tokens),
        block_size=block_size,
        lora_id=None,
        medium=GPU,
        lora_name=None,
        group_idx=group,
        kv_cache_spec_kind=kind,
        position=position,
    )
