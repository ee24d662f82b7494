"""Pictures in prompts: nothing is published, and nothing resumes, strictly inside of one."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.cache import Placement
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy import AUTO, OnGrid
from strandline.cache.policy.placements import Align, EveryBoundary
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtTokens, AtWindowEnds
from strandline.cache.resume import ResumeRule
from strandline.cache.size import WindowClass
from strandline.cache.walk import walk
from strandline.records.account import Reason, SnapshotKind
from strandline.records.pictures import is_virtual, virtual_ids
from strandline.records.tokens import TokenBuffer, decode
from tests.cpu.cache.driver import Driver, only_miss

Tokens = tuple[int, ...]

PIECES = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.sampled_from([1, 2, 30, 63, 64, 65, 100, 300])),
        st.tuples(st.sampled_from(["cat", "dog"]), st.sampled_from([1, 2, 17, 64, 100, 200])),
    ),
    min_size=1,
    max_size=4,
)
CHUNKS = st.lists(st.sampled_from([1, 7, 63, 64, 65, 100, 500]), min_size=1, max_size=6)
CACHES: list[dict[str, Any]] = [
    *({"rule": rule} for rule in (AT_SNAPSHOTS, AtTokens(), AtTokens(64))),
    *({"rule": rule, "windows": (WindowClass(100, 3),)} for rule in (AT_SNAPSHOTS, AtWindowEnds())),
]
PLACEMENTS: list[Placement] = [AUTO, Align(64), EveryBoundary(64), OnGrid(AUTO)]
FEWER = settings(max_examples=max(settings().max_examples // 4, 10))


def prompt_of(pieces: Sequence[tuple[str, int]]) -> Tokens:
    """Return text and pictures, between which there is always a token of text."""
    tokens = [3]
    for index, (kind, size) in enumerate(pieces):
        tokens += [1 + index % 2] * size if kind == "text" else [4, *virtual_ids(kind.encode(), 1, size), 5]
    return (*tokens, 6)


def inside(tokens: Sequence[int]) -> set[int]:
    """Return the positions strictly inside pictures."""
    return {p for p in range(1, len(tokens)) if is_virtual(tokens[p - 1]) and is_virtual(tokens[p])}


def check_published(driver: Driver, prompt: Tokens) -> None:
    """Check that no snapshot on the prompt's path is inside a picture."""
    for _, key, snapshot in published_snapshots(driver.cache):
        assert snapshot.position not in inside(prompt) or tuple(decode(key)) != prompt[: snapshot.position]


def serve(driver: Driver, prompt: Tokens, chunks: Sequence[int], stop_after: int = 10**6) -> None:
    """Serve a request in chunks, preempting it once after some of them, and let it generate a token."""
    for is_last in (False, True):
        lease = driver.admit(prompt)
        assert not {lease.computed, lease.account.kv_tokens} & inside(prompt)
        for step in range(10**6 if is_last else stop_after):
            if lease.computed == len(prompt):
                break
            assert driver.step(lease, min(len(prompt), lease.computed + chunks[step % len(chunks)]))
            check_published(driver, prompt)
        if is_last:
            driver.cache.leave_snapshot(lease, SnapshotKind.PROMPT_END)
            driver.decode(lease, [7])
        driver.release(lease, SnapshotKind.GENERATION_END if is_last else SnapshotKind.PREEMPTION)
        check_published(driver, prompt)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
@pytest.mark.parametrize("cache", CACHES, ids=str)
@FEWER
@given(pieces=PIECES, chunks=CHUNKS, stop_after=st.integers(0, 5), lower_blocks=st.sampled_from([0, 0, 200]))
def test_nothing_is_published_or_resumed_inside_a_picture(
    cache: dict[str, Any],
    placement: Placement,
    pieces: list[tuple[str, int]],
    chunks: list[int],
    stop_after: int,
    lower_blocks: int,
) -> None:
    lower_blocks *= cache["rule"] != AtWindowEnds()
    driver = Driver(60, 5, **cache, placement=placement, lower_blocks=(lower_blocks,))
    prompt = prompt_of(pieces)
    serve(driver, prompt, chunks, stop_after)
    serve(driver, (*prompt, 8), chunks, stop_after)


@pytest.mark.parametrize("cache", CACHES, ids=str)
@FEWER
@given(
    pieces=PIECES.filter(lambda pieces: any(kind != "text" for kind, _ in pieces)),
    chunks=CHUNKS,
    which=st.integers(0, 3),
    num_alike=st.integers(0, 70),
)
def test_hit_never_reaches_beyond_the_start_of_a_replaced_picture(
    cache: dict[str, Any], pieces: list[tuple[str, int]], chunks: list[int], which: int, num_alike: int
) -> None:
    driver = Driver(60, 5, **cache)
    prompt = prompt_of(pieces)
    serve(driver, prompt, chunks)
    starts = [p for p in range(1, len(prompt)) if is_virtual(prompt[p]) and not is_virtual(prompt[p - 1])]
    start = starts[which % len(starts)]
    end = next(p for p in range(start, len(prompt)) if not is_virtual(prompt[p]))
    same = min(num_alike, end - start - 1)  # as if the first ids were the same by chance
    other = (*prompt[: start + same], *virtual_ids(b"other", 1, end - start - same), *prompt[end:])
    account = driver.lookup(other)
    assert account.hit <= start
    assert account.kv_tokens <= start
    serve(driver, other, chunks)


@pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)
def test_next_turn_hits_a_picture_to_the_token(rule: ResumeRule) -> None:
    driver, prompt = Driver(rule=rule), prompt_of([("text", 100), ("cat", 300), ("text", 30)])
    driver.serve(prompt, [7, 8, 9])
    account = driver.lookup((*prompt, 7, 8, 9, 10, 11))
    assert account.hit == len(prompt) + 3


def test_request_with_another_picture_follows_up_to_its_start() -> None:
    driver = Driver()
    pieces = [("text", 200), ("cat", 100), ("text", 30)]
    lease = driver.admit(prompt_of(pieces))
    cat = prompt_of(pieces)
    dog = (*cat[:210], *virtual_ids(b"dog", 1, 90), *cat[300:])
    lead = driver.cache.find_leader(TokenBuffer(dog))
    assert lead is not None
    assert lead.position == cat.index(4) + 1
    driver.cache.follow(lead)
    driver.prefill(lease, 64)
    assert driver.lookup(dog).hit == lead.position


@pytest.mark.parametrize(("num_blocks", "num_loaded"), [(6, 1), (3, 4)])
def test_offer_brings_what_the_device_lacks_beyond_a_cut_picture(num_blocks: int, num_loaded: int) -> None:
    driver, prompt = Driver(lower_blocks=(60,)), prompt_of([("text", 100), ("cat", 300), ("text", 30)])
    driver.serve(prompt)
    parts, tokens = driver.cache.internals(), TokenBuffer(prompt)
    while walk(parts.index.roots[""], tokens.data).kv_tokens > num_blocks * 64:
        assert parts.memory.evict()
    account = driver.lookup(prompt)
    assert account.kv_tokens == prompt.index(4) + 1
    assert only_miss(account).reason is Reason.DEMOTED
    offer = driver.loads.tier_offer(tokens)
    assert offer is not None
    assert (offer.position, len(offer.blocks)) == (len(prompt), num_loaded)
    assert driver.bring_back(prompt)
    assert driver.lookup(prompt).hit == len(prompt)
