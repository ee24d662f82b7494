"""Events on the wire: the schema of vLLM, hashes that other processes can compute, and no salts."""

from collections.abc import Sequence
from hashlib import sha256
from itertools import chain
from typing import Any

import msgspec
import pytest

from strandline.cache.announcing.announcer import restate_events, take_events
from strandline.cache.policy.placements import EveryBoundary
from strandline.events.resumable import PromptHashes, ResumableIndex
from strandline.events.wire import decode_batch, encode_batch
from strandline.records.account import SnapshotKind
from strandline.records.tokens import encode
from tests.cpu.cache.driver import Driver
from tests.cpu.events.reader import Reader


def raw_events(driver: Driver) -> list[dict[str, Any]]:
    """Return what a reader sees that knows only msgpack."""
    ts, events, rank = msgspec.msgpack.decode(encode_batch(12.5, take_events(driver.cache)))
    assert (ts, rank) == (12.5, 0)
    return list(events)


def test_a_message_contains_the_number_of_its_engine() -> None:
    assert decode_batch(encode_batch(1.0, (), 3)).data_parallel_rank == 3


def last_bytes(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def path_digests(tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """Return the hashes of a prompt's whole blocks, the root's first, computed as the documentation says."""
    digests = [sha256(b"strandline\0" + salt).digest()]
    for start in range(0, len(tokens) - 63, 64):
        digests.append(sha256(b"\0" + digests[-1] + encode(tokens[start : start + 64])).digest())
    return digests


def test_events_have_the_schema_of_vllm() -> None:
    driver = Driver(emits_events=True)
    tokens = range(1000, 1150)
    driver.prefill(driver.admit(tokens))
    _, first, second = path_digests(tokens)
    at_150 = sha256(b"\1" + second + encode(tokens[128:])).digest()
    cleared, blocks, snapshot = raw_events(driver)
    common = {"lora_id": None, "medium": "GPU", "lora_name": None}
    assert cleared == {"type": "AllBlocksCleared"}
    assert blocks == {
        **common, "type": "BlockStored", "block_hashes": [last_bytes(first), last_bytes(second)],
        "parent_block_hash": None, "token_ids": [*range(1000, 1128)], "block_size": 64, "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip
    assert snapshot == {
        **common, "type": "BlockStored", "block_hashes": [last_bytes(at_150)],
        "parent_block_hash": last_bytes(second), "token_ids": [*tokens[128:]], "block_size": 22, "group_idx": 1,
        "kv_cache_spec_kind": "mamba", "position": 150,
    }  # fmt: skip


class TheirStored(msgspec.Struct, tag="BlockStored"):
    """The fields that vLLM 0.33 sends of stored blocks, in its order."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[int] | None = None


class TheirRemoved(msgspec.Struct, tag="BlockRemoved"):
    """The fields that it sends of removed blocks."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class TheirCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """The event without fields."""


class TheirBatch(msgspec.Struct, array_like=True):
    """Its batch."""

    ts: float
    events: list[TheirStored | TheirRemoved | TheirCleared]
    data_parallel_rank: int | None = None


def test_readers_with_the_types_of_vllm_decode_events() -> None:
    driver = Driver(emits_events=True)
    driver.serve(range(1000, 1150))
    driver.serve(range(1000, 1150), salt="tenant-1")
    driver.drain()
    batch = msgspec.msgpack.decode(encode_batch(1.0, take_events(driver.cache)), type=TheirBatch)
    stored = [event for event in batch.events if isinstance(event, TheirStored)]
    assert {type(event) for event in batch.events} == {TheirStored, TheirRemoved, TheirCleared}
    assert {(event.group_idx, event.kv_cache_spec_kind) for event in stored} == {(0, "full_attention"), (1, "mamba")}
    assert all(len(event.token_ids) == event.block_size * len(event.block_hashes) for event in stored)


def test_removals_name_the_deepest_block_first() -> None:
    driver = Driver(emits_events=True)
    driver.serve(range(1000, 1150))
    take_events(driver.cache)
    driver.drain()
    _, first, second = map(last_bytes, path_digests(range(1000, 1150)))
    *snapshots, blocks = raw_events(driver)
    assert {event["group_idx"] for event in snapshots} == {1}
    assert blocks == {
        "type": "BlockRemoved", "block_hashes": [second, first], "medium": "GPU", "group_idx": 0
    }  # fmt: skip


def test_later_events_continue_at_the_announced_block() -> None:
    driver = Driver(emits_events=True)
    driver.serve(range(1000, 1100))
    take_events(driver.cache)
    driver.serve(range(1000, 1200))
    stored = [event for event in raw_events(driver) if event["group_idx"] == 0]
    _, first, second, third = map(last_bytes, path_digests(range(1000, 1200)))
    assert [(event["parent_block_hash"], event["block_hashes"]) for event in stored] == [(first, [second, third])]
    assert stored[0]["token_ids"] == [*range(1064, 1192)]


def test_long_paths_are_announced_in_parts() -> None:
    only_the_end = EveryBoundary(2**20, frozenset({SnapshotKind.GENERATION_END}))
    driver = Driver(200, 5, placement=only_the_end, emits_events=True)
    tokens = range(64 * 300 + 5)
    driver.serve(tokens)
    parts = [event for event in raw_events(driver) if event.get("group_idx") == 0]
    assert [len(event["block_hashes"]) for event in parts] == [128, 128, 44]
    assert [*chain.from_iterable(event["token_ids"] for event in parts)] == [*tokens[: 64 * 300]]
    ends = [event["block_hashes"][-1] for event in parts]
    assert [event["parent_block_hash"] for event in parts] == [None, *ends[:-1]]


def test_a_snapshot_and_a_block_never_share_a_hash() -> None:
    driver = Driver(emits_events=True)
    driver.serve(range(1000, 1064))
    _, blocks, snapshot = raw_events(driver)
    assert (snapshot["position"], snapshot["block_size"], snapshot["parent_block_hash"]) == (64, 64, None)
    assert snapshot["token_ids"] == [*range(1000, 1064)]
    assert snapshot["block_hashes"] != blocks["block_hashes"]


@pytest.mark.parametrize("num_tokens", [10, 64, 150])
def test_salted_prompts_show_neither_salt_nor_tokens(num_tokens: int) -> None:
    driver = Driver(emits_events=True)
    tokens, salt = range(1000, 1000 + num_tokens), "tenant-secret"
    driver.serve(tokens, salt=salt)
    events = [*take_events(driver.cache)]
    assert salt.encode() not in encode_batch(0.0, events)
    index = ResumableIndex()
    wire = decode_batch(encode_batch(0.0, events)).events
    for event in wire:
        index.apply(event)
    shown = [*chain.from_iterable(getattr(event, "token_ids", ()) for event in wire)]
    assert shown
    assert not set(shown) & set(tokens)
    assert all(0 <= token < 2**31 for token in shown)
    assert index.hit_tokens(PromptHashes(tokens, salt)) == num_tokens
    for other in ("", "tenant-2"):
        assert index.hit_tokens(PromptHashes(tokens, other)) == 0
        assert index.matched_blocks(PromptHashes(tokens, other)) == 0


def test_restated_salted_prompts_show_the_same_tokens() -> None:
    driver = Driver(emits_events=True)
    driver.serve(range(1000, 1150), salt="tenant-1")
    first, second = encode_batch(0.0, take_events(driver.cache)), encode_batch(0.0, restate_events(driver.cache))
    assert first == second


def test_blocks_alone_overestimate_a_prompt_that_leaves_its_path() -> None:
    driver = Driver(emits_events=True)
    driver.serve(range(1000, 1400))
    reader = Reader(driver.cache)
    prompt = [*range(1000, 1200), 1]
    assert reader.hit(prompt) == driver.lookup(prompt).hit == 0
    assert reader.index.matched_blocks(PromptHashes(prompt)) == 3


def test_a_cache_without_events_collects_none() -> None:
    driver = Driver()
    driver.serve(range(1000, 1400))
    assert take_events(driver.cache) == restate_events(driver.cache) == []
    assert all(
        not run.hashes for root in driver.cache.internals().index.roots.values() for run in root.children.values()
    )


def test_what_was_cached_before_is_restated() -> None:
    driver = Driver(emits_events=True)
    driver.serve(range(1000, 1400))
    lease = driver.admit(range(1000, 1500))
    driver.prefill(lease, leave=False)
    driver.cache.leave_snapshot(lease, SnapshotKind.PROMPT_END)
    first = {type(event) for event in take_events(driver.cache)}
    again = restate_events(driver.cache)
    assert take_events(driver.cache) == []
    assert {type(event) for event in again} <= first
    index = ResumableIndex()
    for event in decode_batch(encode_batch(0.0, again)).events:
        index.apply(event)
    assert index.hit_tokens(PromptHashes(range(1000, 1600))) == 500
