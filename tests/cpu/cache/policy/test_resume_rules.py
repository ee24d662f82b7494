"""Models that keep no states resume wherever keys and values are cached, without snapshots and slots."""

from array import array

import pytest

from strandline.cache.eviction import EvictionOrder
from strandline.cache.inspection.explanation import explain_prompt
from strandline.cache.policy.placements import NoSnapshots
from strandline.cache.policy.resume_rules import AtSnapshots, AtTokens, resume_rule
from strandline.cache.policy.reuse import ReuseHistory
from strandline.cache.policy.worth import CERTAIN_RATE, LeastRecentlyUsed, ReuseRate
from strandline.cache.tree import Run
from strandline.cache.use import NO_INTERARRIVAL, Use
from strandline.ids import BLOCK_TOKENS, NULL_SLOT, RequestId
from strandline.records.account import Miss, Reason, SnapshotKind
from strandline.records.actions import CopyTokens
from strandline.records.tokens import TokenBuffer
from strandline.specs import LayerSpec, ModelSpec, TensorSpec, kv_spec
from tests.cpu.cache.driver import Driver, only_miss, reasons
from tests.cpu.cache.history import fingerprint
from tests.cpu.cache.test_lookup import prompt

LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129]


def make_driver(num_slabs: int = 40, *, grid_tokens: int = 1, order: EvictionOrder | None = None) -> Driver:
    return Driver(num_slabs, 1, rule=AtTokens(grid_tokens), order=order)


def test_rule_follows_from_what_layers_keep() -> None:
    attention = kv_spec(2, 8, "float32")
    window = LayerSpec(states=(TensorSpec("window", (3, 8), "float32"),))
    assert resume_rule(ModelSpec((attention, attention), 8, "float32")) == AtTokens(1)
    assert resume_rule(ModelSpec((attention, LayerSpec()), 8, "float32"), grid_tokens=64) == AtTokens(64)
    assert resume_rule(ModelSpec((attention, window), 8, "float32")) == AtSnapshots()


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_identical_prompt_computes_its_last_token_alone(num_tokens: int) -> None:
    driver = make_driver()
    driver.serve(prompt(num_tokens))
    account = driver.serve(prompt(num_tokens))
    assert (account.hit, account.kv_tokens, account.snapshot_kind) == (num_tokens - 1, num_tokens, None)
    assert only_miss(account) == Miss(Reason.REPEATED, num_tokens - 1, num_tokens)


@pytest.mark.parametrize("position", [*LENGTHS, 149])
def test_diverging_prompts_hit_all_shared_tokens(position: int) -> None:
    driver = make_driver()
    driver.serve(prompt(150))
    account = driver.serve(prompt(position) + prompt(30, 5000))
    assert account.hit == account.kv_tokens == position
    assert reasons(account) == {Reason.DIVERGED: 30}


@pytest.mark.parametrize("chunk", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("kind", [SnapshotKind.GENERATION_END, SnapshotKind.PREEMPTION])
def test_all_that_was_computed_is_hit_after_release(kind: SnapshotKind, chunk: int) -> None:
    driver = make_driver()
    lease = driver.admit(prompt(90))
    driver.prefill(lease, chunk, leave=False)
    driver.decode(lease, prompt(45, 9000))
    driver.release(lease, kind)
    assert driver.lookup(prompt(90) + prompt(45, 9000) + [5]).hit == 135


def test_whole_prompt_is_hit_while_the_first_request_decodes() -> None:
    driver = make_driver()
    first = driver.admit(prompt(100))
    driver.prefill(first)
    driver.decode(first, [7, 8, 9])
    second = driver.admit([*prompt(100), 1])
    assert second.computed == 100
    driver.decode(first, [10] * 40)
    driver.prefill(second)
    driver.decode(second, [11] * 40)
    driver.flush()


def test_only_the_first_tokens_of_a_shared_block_are_copied() -> None:
    driver = make_driver()
    driver.serve(prompt(100))
    lease = driver.admit([*prompt(80), 1])
    copies = [action for action in driver.cache.take_actions() if isinstance(action, CopyTokens)]
    assert [copy.num_tokens for copy in copies] == [80 % BLOCK_TOKENS]
    assert len(lease.table) == 2


def test_requests_and_hits_take_no_slots() -> None:
    driver = make_driver()
    leases = [driver.admit(prompt(70, first)) for first in (1000, 2000)]
    for lease in leases:
        driver.prefill(lease)
        assert (lease.src, lease.dst) == (NULL_SLOT, NULL_SLOT)
    driver.serve(prompt(75))
    stats = driver.cache.stats()
    assert (stats.memory.num_slots, stats.num_snapshots, sum(stats.snapshots_taken.values())) == (0, 0, 0)


def test_placement_does_not_matter() -> None:
    driver = Driver(40, 1, rule=AtTokens(), placement=NoSnapshots())
    driver.serve(prompt(150))
    assert driver.lookup(prompt(151)).hit == 150
    driver.admit(prompt(500, 3000))
    assert driver.cache.find_leader(TokenBuffer(prompt(400, 3000))) is not None


@pytest.mark.parametrize("num_shared", [65, 100, 128, 150])
def test_follower_resumes_where_it_diverges_from_its_leader(num_shared: int) -> None:
    driver = make_driver()
    leader = driver.admit(prompt(300))
    tokens = prompt(num_shared) + prompt(40, 5000)
    lead = driver.cache.find_leader(TokenBuffer(tokens))
    assert lead is not None
    driver.cache.follow(lead)
    while lead.is_pending:
        driver.step(leader, leader.computed + 50)
    assert driver.admit(tokens).computed == num_shared


@pytest.mark.parametrize("num_tokens", [2, 64, 100])
def test_identical_prompts_that_wait_are_computed_once(num_tokens: int) -> None:
    driver = make_driver()
    leader = driver.admit(prompt(num_tokens))
    lead = driver.cache.find_leader(TokenBuffer(prompt(num_tokens)))
    assert lead is not None
    assert lead.position == num_tokens - 1
    driver.cache.follow(lead)
    driver.step(leader, num_tokens)
    assert not lead.is_pending
    assert driver.cache.find_leader(TokenBuffer(prompt(num_tokens))) is None
    assert driver.admit(prompt(num_tokens)).computed == num_tokens - 1


def test_no_leader_is_found_for_what_is_cached() -> None:
    driver = make_driver()
    driver.serve(prompt(100))
    driver.admit(prompt(100) + prompt(300, 5000))
    assert driver.cache.find_leader(TokenBuffer(prompt(100))) is None


def test_baseline_evicts_the_least_recently_used_blocks() -> None:
    driver = make_driver(11, order=LeastRecentlyUsed())  # ten blocks
    for first in (1000, 2000, 3000):
        driver.serve(prompt(192, first))  # three blocks each
    driver.serve(prompt(192, 1000))
    driver.serve(prompt(192, 7000))
    assert [driver.lookup(prompt(192, first)).hit for first in (1000, 2000, 3000)] == [191, 64, 191]
    assert reasons(driver.lookup(prompt(192, 2000))) == {Reason.EVICTED: 128}


def test_hit_inside_a_partly_filled_block_counts_as_its_use() -> None:
    driver = make_driver(8, order=LeastRecentlyUsed())  # seven blocks
    for first in (1000, 2000):
        driver.serve(prompt(190, first))
    driver.serve(prompt(190, 1000))
    driver.serve(prompt(128, 7000))
    assert [driver.lookup(prompt(190, first)).hit for first in (1000, 2000)] == [189, 128]


def test_expected_hit_of_a_queued_request_is_evicted_last() -> None:
    driver = make_driver(11)
    driver.serve(prompt(190, 1000))
    driver.cache.expect(RequestId("queued"), TokenBuffer(prompt(190, 1000)))
    for first in range(2000, 9000, 1000):
        driver.serve(prompt(190, first))
    assert driver.lookup(prompt(190, 1000)).hit == 189
    driver.cache.forget(RequestId("queued"))
    for first in range(10_000, 18_000, 1000):
        driver.serve(prompt(190, first))
    assert driver.lookup(prompt(190, 1000)).hit < 189


def test_queued_request_waits_for_what_is_left_of_its_hit() -> None:
    driver = make_driver(11)
    driver.serve(prompt(640))
    driver.cache.expect(RequestId("queued"), TokenBuffer(prompt(640)))
    lease = driver.admit(prompt(500, 5000))
    driver.prefill(lease)
    (root,) = driver.cache.internals().index.roots.values()
    assert sum(run.num_waiters for run in root.children.values()) == 1
    assert driver.lookup(prompt(640)).hit == 128
    driver.prefill(driver.admit(prompt(128, 9000)))
    assert driver.lookup(prompt(640)).hit == 0
    assert root.num_waiters == 1
    driver.cache.forget(RequestId("queued"))
    assert root.num_waiters == 0


def test_prefix_that_several_prompts_share_outlives_their_own_tokens() -> None:
    driver = make_driver(31)
    for index in range(20):
        driver.serve(prompt(640) + prompt(640, 10_000 * (index + 1)))
    assert driver.lookup(prompt(640) + prompt(10, 5)).hit == 640


def test_conversation_that_returns_outlives_newer_prompts_that_do_not() -> None:
    driver = make_driver(31)
    history = prompt(200)
    for turn in range(12):
        history = history + prompt(20, 2_000 + 100 * turn)
        assert (driver.serve(history).hit > 0) == (turn > 0)
        for index in range(4):
            driver.serve(prompt(250, 10_000 + 1_000 * (4 * turn + index)))


def test_rate_falls_with_time_and_equal_rates_with_recency() -> None:
    reuse = ReuseHistory()
    order = ReuseRate(reuse)
    runs = [Run(None, 0, b"", array("i")) for _ in range(2)]
    runs[1].last_tick = 1
    assert CERTAIN_RATE <= order.worth(runs[0]) < order.worth(runs[1])
    before, review_at = order.appraise(runs[0])
    assert review_at == 1
    for _ in range(10):
        reuse.count_admission()
    assert order.worth(runs[0]) < order.worth(runs[1]) < before
    runs[0].use = Use(reuse.now, NO_INTERARRIVAL)
    assert order.worth(runs[0]) == before


def test_lone_request_without_room_resumes_after_whole_blocks() -> None:
    driver = make_driver(3)  # two blocks
    driver.serve(prompt(100))
    lease = driver.admit(prompt(80) + prompt(30, 5000))
    assert (lease.computed, lease.account.hit) == (64, 64)
    assert reasons(lease.account) == {Reason.NO_ROOM: 16, Reason.DIVERGED: 30}
    driver.prefill(lease)


def test_refused_admission_changes_nothing() -> None:
    driver = make_driver(6)
    driver.serve(prompt(40))
    driver.admit(prompt(100, 5000))
    driver.flush()
    before = fingerprint(driver)
    assert driver.try_admit(prompt(1000, 9000), step_tokens=1000) is None
    assert fingerprint(driver) == before


@pytest.mark.parametrize(("num_tokens", "hit"), [(63, 0), (64, 0), (65, 64), (128, 64), (129, 128), (150, 128)])
def test_prompts_resume_on_the_grid_if_they_must(num_tokens: int, hit: int) -> None:
    driver = make_driver(grid_tokens=BLOCK_TOKENS)
    driver.serve(prompt(150))
    account = driver.serve(prompt(num_tokens))
    assert account.hit == hit
    assert reasons(account) == {Reason.REPEATED: num_tokens - hit}


def test_explanations_do_not_speak_of_snapshots() -> None:
    driver = make_driver(8, order=LeastRecentlyUsed())
    for first in (1000, 2000, 3000):
        driver.serve(prompt(192, first))
    explanation = explain_prompt(driver.cache, TokenBuffer(prompt(192, 1000)), block_bytes=2**20)
    assert reasons(explanation.account) == {Reason.EVICTED: 128}
    assert [advice.text for advice in explanation.advice] == [
        "more memory: the evicted data took at least 2.0 MiB; raise --memory, or add --host-memory"
    ]


def test_disabled_cache_keeps_nothing() -> None:
    driver = Driver(40, 1, rule=AtTokens(), enabled=False)
    driver.serve(prompt(100), generated=[1, 2])
    assert driver.serve(prompt(100)).hit == 0
    assert driver.cache.memory_use().num_blocks == 0
