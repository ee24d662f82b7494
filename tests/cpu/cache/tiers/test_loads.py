"""Loads from stores: what they bring, what they leave alone, and how they end."""

from dataclasses import replace

import pytest

from strandline.cache.admission_terms import AdmissionTerms
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy.resume_rules import AtTokens
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, TransferId
from strandline.records.account import Miss, Reason, SnapshotKind
from strandline.records.actions import Completion, LoadIn
from strandline.records.tokens import TokenBuffer
from tests.cpu.cache.driver import Driver, reasons
from tests.cpu.cache.history import pattern

PROMPT = pattern(7, 400)


def test_prompts_hit_what_was_loaded() -> None:
    driver = Driver()
    lead = driver.load(PROMPT, driver.offer(PROMPT, [100, 390]))
    assert lead is not None
    assert (lead.position, lead.is_pending) == (390, True)
    assert driver.lookup(PROMPT).misses == (Miss(Reason.LOADING, 0, 390), Miss(Reason.DIVERGED, 390, 400))
    driver.end_load(TransferId(1), is_done=True)
    assert not lead.is_pending
    assert driver.lookup(PROMPT).hit == 390
    assert driver.lookup(PROMPT[:150]).hit == 100
    assert driver.serve(PROMPT, [1, 2]).hit == 390
    stats = driver.cache.stats()
    assert (stats.loads.num_done, stats.loads.num_snapshots, stats.loads.num_blocks) == (1, 2, 7)
    assert sum(stats.snapshots_taken.values()) == 2, "those loaded were not taken here"


def test_only_what_the_device_lacks_is_loaded() -> None:
    driver = Driver()
    driver.serve(PROMPT[:200])
    offer = driver.offer(PROMPT, [200, 390])
    driver.loads.begin(TokenBuffer(PROMPT), offer)
    [action] = [action for action in driver.cache.take_actions() if isinstance(action, LoadIn)]
    assert [address for _, address in action.blocks] == list(offer.blocks[200 // BLOCK_TOKENS :])
    assert [each.address for each in action.snapshots] == [offer.snapshots[1].address]


def test_a_snapshot_alone_is_loaded_where_its_kv_is_cached() -> None:
    driver = Driver()
    driver.serve(PROMPT)
    driver.load(PROMPT, driver.offer(PROMPT, [128]))
    driver.end_load(TransferId(1), is_done=True)
    assert driver.lookup(PROMPT[:130]).hit == 128
    assert driver.cache.stats().loads.num_blocks == 0


def test_useless_offers_are_refused() -> None:
    driver = Driver()
    driver.serve(PROMPT[:200])
    whole = driver.offer(PROMPT, [390])
    cases = {
        "cached": driver.offer(PROMPT, [100, 200]),
        "gap before it": driver.offer(PROMPT, [390], first_block=4),
        "blocks missing at its end": replace(whole, blocks=whole.blocks[:-1]),
        "longer than the prompt": driver.offer([*PROMPT, 1, 2], [402]),
    }
    for name, offer in cases.items():
        assert not driver.loads.is_lacking(TokenBuffer(PROMPT), offer), name
        assert driver.load(PROMPT, offer) is None, name


def test_failed_loads_leave_nothing_behind() -> None:
    driver = Driver()
    driver.serve(PROMPT[:100])
    before = driver.cache.memory_use()
    lead = driver.load(PROMPT, driver.offer(PROMPT, [300, 390]))
    assert lead is not None
    driver.loads.cancel(lead)
    assert driver.cache.memory_use() != before, "its memory is held until the transfer has ended"
    driver.flush()
    driver.end_load(TransferId(1), is_done=False)
    assert driver.cache.memory_use() == before
    assert driver.lookup(PROMPT).hit == 100
    assert driver.cache.stats().loads.num_failed == 1


def test_tokens_of_failed_loads_are_missed_for_that_reason() -> None:
    driver = Driver()
    driver.serve(PROMPT[:100])
    lease = driver.cache.admit(driver.lease_name(), TokenBuffer(PROMPT), terms=AdmissionTerms(load_failed_end=390))
    assert lease is not None
    assert lease.account.misses == (Miss(Reason.LOAD_FAILED, 100, 390), Miss(Reason.DIVERGED, 390, 400))
    assert driver.cache.stats().missed_tokens[Reason.LOAD_FAILED] == 290


def test_loads_must_fit_beside_their_requests() -> None:
    driver = Driver(num_slabs=4)
    long = pattern(1, 11 * BLOCK_TOKENS)
    offer = driver.offer(long, [640])
    assert driver.load(long, offer, step_tokens=BLOCK_TOKENS) is None, "snapshot, state and blocks need four slabs"
    assert driver.load(long[:200], driver.offer(long[:200], [199])) is not None


def test_prompts_computed_meanwhile_share_their_blocks() -> None:
    driver = Driver()
    driver.load(PROMPT, driver.offer(PROMPT, [390]))
    driver.serve(PROMPT)
    driver.end_load(TransferId(1), is_done=True)
    assert driver.cache.stats().memory.num_blocks == 7
    assert driver.lookup(PROMPT[:395]).hit == 390


def test_longer_loads_lead_and_other_salts_do_not() -> None:
    driver = Driver()
    for position in (100, 300, 200):
        driver.load(PROMPT, driver.offer(PROMPT, [position]))
    lead = driver.cache.find_leader(TokenBuffer(PROMPT[:250]))
    assert lead is not None
    assert lead.position == 200
    assert driver.cache.find_leader(TokenBuffer(PROMPT), "other") is None


def test_a_prompt_without_states_hits_to_the_last_loaded_token() -> None:
    driver = Driver(rule=AtTokens())
    assert driver.load(PROMPT, driver.offer(PROMPT[:390])) is not None
    driver.end_load(TransferId(1), is_done=True)
    assert driver.lookup(PROMPT).hit == 390
    assert reasons(driver.serve(PROMPT)) == {Reason.DIVERGED: 10}


def test_completions_of_unknown_transfers_are_refused() -> None:
    with pytest.raises(CacheInvariantError, match="transfer 1 ended but had not begun"):
        Driver().loads.complete(Completion(TransferId(1), is_done=True))


def test_loaded_snapshots_keep_their_kind() -> None:
    driver = Driver()
    driver.load(PROMPT, driver.offer(PROMPT, [390]))
    driver.end_load(TransferId(1), is_done=True)
    [(_, _, snapshot)] = published_snapshots(driver.cache)
    assert snapshot.kind is SnapshotKind.LADDER
