"""Explanations: the path and what lies on it, where a prompt leaves the cache, and advice that holds when followed."""

import pytest

from strandline.cache.admission_terms import AdmissionTerms
from strandline.cache.inspection.explanation import explain_admission, explain_lookup, explain_prompt, tier_tokens
from strandline.cache.inspection.lookups import Lookup
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy.placements import NoSnapshots
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtWindowEnds
from strandline.cache.resume import ResumeRule
from strandline.cache.size import WindowClass
from strandline.ids import RequestId
from strandline.records.account import Reason, SnapshotKind
from strandline.records.explanation import Advice, Explanation, Help
from strandline.records.tokens import TokenBuffer, encode
from tests.cpu.cache.driver import Driver, only_miss
from tests.cpu.cache.inspection.test_view import fingerprint
from tests.cpu.cache.test_lookup import prompt
from tests.cpu.cache.test_reasons import SnapshotsFirst
from tests.cpu.cache.tiers.test_lower_tier import evict_all, tier

MIB = 2**20


def explain(driver: Driver, tokens: list[int], salt: str = "") -> Explanation:
    before = fingerprint(driver.cache)
    explanation = explain_prompt(driver.cache, TokenBuffer(tokens), salt, block_bytes=MIB)
    assert fingerprint(driver.cache) == before, "explaining has changed something"
    assert explanation.account == driver.lookup(tokens, salt)
    return explanation


def only_advice(explanation: Explanation) -> Advice:
    [advice] = explanation.advice
    return advice


def test_whole_hit_gets_no_advice() -> None:
    driver = Driver()
    driver.serve(prompt(150), prompt(5, 9000))
    explanation = explain(driver, prompt(150))
    assert (explanation.account.hit, explanation.kv_now, explanation.parting, explanation.advice) == (
        150,
        150,
        None,
        (),
    )
    assert [(found.position, found.kind) for found in explanation.snapshots] == [(150, SnapshotKind.PROMPT_END)]
    assert explanation.next_snapshot == 155


def test_next_snapshot_lies_on_a_cached_continuation() -> None:
    driver = Driver()
    driver.serve(prompt(200))
    driver.serve(prompt(70) + prompt(10, 5000))
    assert explain(driver, prompt(100)).next_snapshot == 200


def test_unknown_salt_and_empty_cache_show_nothing() -> None:
    driver = Driver()
    assert explain(driver, prompt(100)) == explain(driver, prompt(100), "salt")
    assert explain(driver, prompt(100)).snapshots == ()


def test_explanation_shows_where_a_prompt_diverges_and_both_continuations() -> None:
    driver = Driver()
    driver.serve(prompt(150))
    parting = explain(driver, prompt(100) + prompt(40, 5000)).parting
    assert parting is not None
    assert parting.position == 100
    assert parting.before == tuple(prompt(32, 1068))
    assert parting.prompt == tuple(prompt(32, 5000))
    assert parting.cached == (tuple(prompt(32, 1100)),)


@pytest.mark.parametrize("position", [10, 64, 100, 128])
def test_all_continuations_are_found_at_any_position_in_a_block(position: int) -> None:
    driver = Driver(100, 5)
    for first in (5000, 6000):
        driver.serve(prompt(position) + prompt(80, first))
    explanation = explain(driver, prompt(position) + prompt(80, 7000))
    assert explanation.parting is not None
    assert explanation.parting.position == position
    assert {cached[0] for cached in explanation.parting.cached} == {5000, 6000}


def test_advised_mark_would_have_helped() -> None:
    advised = only_advice(explain(served(Driver()), prompt(100) + prompt(40, 5000)))
    assert (advised.help, advised.position, advised.num_tokens) == (Help.MARK, 100, 100)
    driver = Driver()
    lease = driver.cache.admit(
        RequestId("marked"), TokenBuffer(prompt(150)), terms=AdmissionTerms(marks=(advised.position,))
    )
    assert lease is not None
    driver.prefill(lease)
    assert driver.lookup(prompt(100) + prompt(40, 5000)).hit == advised.num_tokens


def served(driver: Driver) -> Driver:
    driver.serve(prompt(150))
    return driver


def test_branch_is_not_promised_by_a_placement_without_branches() -> None:
    tokens = prompt(100) + prompt(40, 5000)
    assert "diverges there takes the snapshot" in only_advice(explain(served(Driver()), tokens)).text
    assert (
        "diverges there takes the snapshot"
        not in only_advice(explain(served(Driver(placement=NoSnapshots())), tokens)).text
    )


def test_advised_memory_would_have_prevented_the_eviction() -> None:
    hits = []
    for num_slabs in (4, 5):
        driver = Driver(num_slabs, 5, order=SnapshotsFirst())
        driver.serve(prompt(150))
        for first in (3000, 4000, 5000):
            driver.admit(prompt(1, first))
        explanation = explain(driver, prompt(150))
        hits.append(explanation.account.hit)
        if not explanation.account.hit:
            assert (only_advice(explanation).help, only_advice(explanation).num_tokens) == (Help.MEMORY, 150)
            assert "5.0 MiB" in only_advice(explanation).text
    assert hits == [0, 150]


def test_advised_memory_includes_evicted_keys_and_values() -> None:
    driver = Driver(4, 2)
    driver.serve(prompt(128))
    other = driver.admit(prompt(300, 5000))
    assert driver.cache.extend(other, 300)
    advice = only_advice(explain(driver, prompt(128)))
    assert (advice.help, advice.num_tokens) == (Help.MEMORY, 128)
    assert "4.0 MiB" in advice.text, "two blocks, and a snapshot of two blocks"


@pytest.mark.parametrize(("rule", "size"), [(AT_SNAPSHOTS, "9.0 MiB"), (AtWindowEnds(), "4.0 MiB")])
def test_advised_memory_includes_the_window(rule: ResumeRule, size: str) -> None:
    driver = Driver(rule=rule, windows=(WindowClass(101, 3),))
    driver.serve(prompt(150))
    driver.cache.internals().memory.drop_snapshot(next(published_snapshots(driver.cache))[2])
    advice = only_advice(explain(driver, prompt(150)))
    assert (advice.help, size in advice.text) == (Help.MEMORY, True), "a slot of five blocks, and the window's"


@pytest.mark.parametrize("num_changed", [1, 3, 4, 5, 200])
@pytest.mark.parametrize("position", [0, 64, 90])
def test_advised_order_shares_as_many_tokens_as_promised(position: int, num_changed: int) -> None:
    head, stable = prompt(position), prompt(300, 20_000)
    old, new = prompt(num_changed, 5000), prompt(num_changed, 6000)
    driver = Driver(100, 5)
    driver.serve(head + old + stable)
    advice = next(a for a in explain(driver, head + new + stable).advice if a.help is Help.ORDER)
    assert (advice.position, advice.num_tokens) == (position, 300)
    followed = Driver(100, 5)
    followed.serve(head + stable + old)
    assert followed.lookup(head + stable + new).kv_tokens == position + advice.num_tokens


def test_order_is_advised_when_the_changing_part_differs_in_length() -> None:
    driver = Driver(100, 5)
    driver.serve(prompt(70) + prompt(2, 5000) + prompt(300, 20_000))
    longer = explain(driver, prompt(70) + prompt(9, 6000) + prompt(300, 20_000))
    missing = explain(driver, prompt(70) + prompt(300, 20_000))
    for explanation in (longer, missing):
        assert [a.num_tokens for a in explanation.advice if a.help is Help.ORDER] == [300]


def test_order_is_not_advised_for_new_tokens() -> None:
    driver = served(Driver())
    assert all(a.help is not Help.ORDER for a in explain(driver, prompt(100) + prompt(400, 5000)).advice)


def test_explanation_names_the_request_that_computes_the_prefix() -> None:
    driver = Driver()
    driver.admit(prompt(200), "leader")
    advice = only_advice(explain(driver, prompt(150)))
    assert advice.help is Help.PATIENCE
    assert "leader" in advice.text


def test_request_that_does_not_read_is_advised_to() -> None:
    driver = Driver(enabled=False)
    assert only_advice(explain(driver, prompt(50))).help is Help.ASK


def test_past_lookup_keeps_its_account_and_ignores_its_own_tokens() -> None:
    driver = Driver(100, 5)
    driver.serve(prompt(150))
    tokens = prompt(100) + prompt(200, 5000)
    account = driver.serve(tokens)
    lookup = Lookup(RequestId("past"), "", 0.0, account)
    explanation = explain_lookup(driver.cache, lookup, encode(tokens), block_bytes=MIB)
    assert explanation.account is account
    assert explanation.account.misses[0].reason is Reason.NO_SNAPSHOT
    assert explanation.kv_now == 300
    assert explanation.parting is not None
    assert explanation.parting.cached == (tuple(prompt(32, 1100)),)
    assert [(s.position, s.kind) for s in explanation.snapshots] == [(100, SnapshotKind.BRANCH)]
    assert "a snapshot at 100 now" in only_advice(explanation).text


def test_divergence_is_omitted_once_the_cached_prompt_is_evicted() -> None:
    driver = Driver(7, 2)
    driver.serve(prompt(100))
    account = driver.serve(prompt(90) + prompt(40, 5000))
    assert account.kv_tokens == 90
    for first in range(20_000, 30_000, 1000):
        driver.serve(prompt(250, first))
    lookup = Lookup(RequestId("past"), "", 0.0, account)
    explanation = explain_lookup(driver.cache, lookup, encode(prompt(90) + prompt(40, 5000)), block_bytes=MIB)
    assert (explanation.kv_now, explanation.parting, explanation.snapshots) == (0, None, ())
    assert only_miss(driver.lookup(prompt(90))).reason in {Reason.EVICTED, Reason.FIRST_SEEN}


def test_what_rests_is_said_to_be_loaded_or_computed() -> None:
    driver = Driver(lower_blocks=(100,))
    driver.serve(prompt(300))
    evict_all(driver)
    advice = only_advice(explain(driver, prompt(300)))
    assert (advice.help, advice.num_tokens) == (Help.LOAD, 300)
    assert "waits until these tokens have been loaded, and hits them" in advice.text
    tier(driver).costs.observe_load(1, 1e9)
    tier(driver).costs.observe_prefill(1000, 1e-9)
    advice = only_advice(explain(driver, prompt(300)))
    assert "computing these tokens takes less time than loading them" in advice.text


def test_requests_that_computed_what_rested_are_told_why() -> None:
    driver = Driver(lower_blocks=(100,))
    driver.serve(prompt(300))
    evict_all(driver)
    lookup = Lookup(RequestId("a"), "", 0.0, driver.lookup(prompt(300)))
    told = explain_lookup(driver.cache, lookup, encode(prompt(300)), block_bytes=MIB).advice
    assert [advice.help for advice in told] == [Help.MEMORY]
    assert "raise --memory or lower --max-num-seqs" in told[0].text
    assert driver.bring_back(prompt(300))
    told = explain_lookup(driver.cache, lookup, encode(prompt(300)), block_bytes=MIB).advice
    assert [advice.help for advice in told] == [Help.LOAD]
    assert "else there was no memory" in told[0].text


def test_at_admission_it_is_known_why_nothing_was_loaded() -> None:
    driver = Driver(lower_blocks=(100,))
    driver.serve(prompt(300))
    evict_all(driver)
    lookup = Lookup(RequestId("a"), "", 0.0, driver.lookup(prompt(300)))
    tokens = encode(prompt(300))
    assert tier_tokens(driver.cache, tokens) == {"host": 300}
    [advice] = explain_admission(driver.cache, lookup, tokens, block_bytes=MIB).advice
    assert (advice.help, "raise --memory or lower" in advice.text) == (Help.MEMORY, True), "loading would have paid"
    tier(driver).costs.observe_load(1, 1e9)
    tier(driver).costs.observe_prefill(1000, 1e-9)
    [advice] = explain_admission(driver.cache, lookup, tokens, block_bytes=MIB).advice
    assert (advice.help, "takes less time" in advice.text) == (Help.LOAD, True)


def test_what_no_longer_rests_is_explained_with_both_causes() -> None:
    driver = Driver(lower_blocks=(100,))
    driver.serve(prompt(300))
    evict_all(driver)
    lookup = Lookup(RequestId("a"), "", 0.0, driver.lookup(prompt(300)))
    assert driver.bring_back(prompt(300))
    assert tier_tokens(driver.cache, encode(prompt(300))) == {}
    [advice] = explain_admission(driver.cache, lookup, encode(prompt(300)), block_bytes=MIB).advice
    assert "else there was no memory" in advice.text


def test_failed_loads_send_to_the_log() -> None:
    driver = Driver()
    account = driver.lookup(prompt(100)).blaming(Reason.LOAD_FAILED, 80)
    lookup = Lookup(RequestId("a"), "", 0.0, account)
    [advice] = explain_lookup(driver.cache, lookup, encode(prompt(100)), block_bytes=MIB).advice
    assert (advice.help, advice.position, advice.num_tokens) == (Help.STORE, 80, 80)
    assert "server's log" in advice.text


@pytest.mark.parametrize(
    ("lower_blocks", "disk_blocks", "flags"),
    [
        (0, 0, "--memory, or add --host-memory"),
        (1, 0, "--memory or --host-memory"),
        (1, 1, "--memory, --host-memory or --disk-cache-size"),
    ],
)
def test_advised_memory_names_the_flags_there_are(lower_blocks: int, disk_blocks: int, flags: str) -> None:
    driver = Driver(4, 2, lower_blocks=(lower_blocks, disk_blocks))
    driver.serve(prompt(128))
    other = driver.admit(prompt(300, 5000))
    assert driver.cache.extend(other, 300)
    assert only_advice(explain(driver, prompt(128))).text.endswith(flags)
