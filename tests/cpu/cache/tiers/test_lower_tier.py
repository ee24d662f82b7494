"""The tier below the device: what rests, what returns, and what is evicted from it."""

import pytest

from strandline.cache.evict_all import evict_all as evict_unused
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtTokens
from strandline.cache.resume import ResumeRule
from strandline.cache.tiers import LoadCosts, loads
from strandline.cache.tiers.load_costs import FIRST_LIMIT_S, LEAST_LIMIT_S, PREFILLS_PER_LOSS
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.use import Use
from strandline.ids import TransferId
from strandline.records.account import Miss, Reason
from strandline.records.actions import LoadIn
from strandline.records.tokens import TokenBuffer
from strandline.specs import SnapshotSize
from tests.cpu.cache.driver import Driver
from tests.cpu.cache.history import pattern

PROMPT = pattern(7, 400)


def evict_all(driver: Driver) -> None:
    """Evict all that the device holds."""
    evict_unused(driver.cache)
    driver.flush()
    assert driver.cache.memory_use().num_blocks == 0


def tier(driver: Driver) -> LowerTier:
    return driver.loads.tiers[0]


def evicted(prompt: list[int] = PROMPT, lower_blocks: int = 100, rule: ResumeRule = AT_SNAPSHOTS) -> Driver:
    """Return a driver that has served a prompt and evicted it."""
    driver = Driver(lower_blocks=(lower_blocks,), rule=rule)
    driver.serve(prompt)
    evict_all(driver)
    return driver


def test_evicted_prompts_return_whole_and_leave_the_tier() -> None:
    driver = evicted()
    assert tier(driver).num_used == 6 + 1 + 5, "whole blocks, the one that the snapshot lies in, and its slot"
    assert driver.lookup([*PROMPT, 1]).misses == (Miss(Reason.DEMOTED, 0, 400), Miss(Reason.DIVERGED, 400, 401))
    assert driver.bring_back([*PROMPT, 1])
    assert driver.lookup(PROMPT).hit == 400
    assert (tier(driver).num_used, tier(driver).num_snapshots) == (0, 0)
    assert driver.serve(PROMPT, [1, 2]).hit == 400


def test_only_the_evicted_part_of_a_path_is_loaded() -> None:
    driver = Driver(lower_blocks=(100,))
    driver.serve(PROMPT[:192])
    driver.serve(PROMPT)
    memory = driver.cache.internals().memory
    [deepest] = [snapshot for _, _, snapshot in published_snapshots(driver.cache) if snapshot.position == 400]
    memory.drop_snapshot(deepest)
    driver.flush()
    assert driver.lookup(PROMPT).hit == 192
    assert driver.bring_back(PROMPT)
    assert driver.lookup(PROMPT).hit == 400
    loads = driver.cache.stats().loads
    assert (loads.num_snapshots, loads.num_blocks) == (1, 1), "the slot and the block that it lies in"


def test_what_takes_longer_to_load_is_computed() -> None:
    driver = evicted()
    costs = tier(driver).costs
    costs.observe_load(1000, 1.0)
    costs.observe_prefill(1000, 1e-6)
    assert driver.loads.tier_offer(TokenBuffer(PROMPT)) is None
    assert driver.serve(PROMPT).misses == (Miss(Reason.DEMOTED, 0, 400),)
    assert driver.cache.stats().missed_tokens[Reason.DEMOTED] == 400


def test_failed_loads_are_forgotten() -> None:
    driver = evicted()
    assert driver.load_from_tier(PROMPT) is not None
    driver.end_load(tier_transfer(driver), is_done=False)
    assert (tier(driver).num_used, tier(driver).num_snapshots) == (0, 0)
    assert driver.loads.tier_offer(TokenBuffer(PROMPT)) is None
    assert driver.serve(PROMPT).hit == 0


def tier_transfer(driver: Driver) -> TransferId:
    """Return the number of the load under way."""
    [transfer] = driver.device.loading
    return transfer


def test_other_salts_do_not_see_what_rests() -> None:
    driver = evicted()
    assert driver.loads.tier_offer(TokenBuffer(PROMPT), "other") is None
    assert Reason.DEMOTED not in {miss.reason for miss in driver.lookup(PROMPT, "other").misses}


def test_the_least_valuable_snapshot_makes_room() -> None:
    driver = evicted(PROMPT[:130], lower_blocks=15)
    for _ in range(3):
        driver.serve(PROMPT)
    evict_all(driver)
    demoted = [snapshot.position for snapshot in tier(driver).snapshots()]
    assert demoted == [400]
    assert tier(driver).num_snapshots_evicted > 0


def test_what_is_worth_less_is_not_taken_in() -> None:
    driver = evicted(lower_blocks=13)
    driver.bring_back(PROMPT)
    evict_all(driver)
    driver.serve(pattern(8, 3))
    evict_all(driver)
    assert tier(driver).num_snapshots_refused == 1
    assert [snapshot.position for snapshot in tier(driver).snapshots()] == [400]


def test_a_snapshot_that_does_not_fit_is_gone() -> None:
    driver = evicted(lower_blocks=4)
    assert tier(driver).num_used == 0
    assert driver.lookup(PROMPT).hit == 0


def test_blocks_without_states_return_to_the_deepest_one() -> None:
    driver = evicted(rule=AtTokens())
    assert tier(driver).num_used == 6
    assert driver.bring_back(PROMPT)
    assert driver.lookup(PROMPT).hit == 384
    assert driver.lookup([*PROMPT[:300], 3]).hit == 300
    assert tier(driver).num_used == 0


def test_what_is_loaded_is_not_lost_meanwhile() -> None:
    driver = evicted(lower_blocks=13)
    assert driver.load_from_tier(PROMPT) is not None
    assert tier(driver).num_used == 0, "what is being read may be overwritten"
    for seed in range(8, 12):
        driver.serve(pattern(seed, 500))
    driver.end_load(tier_transfer(driver), is_done=True)
    assert driver.lookup(PROMPT).hit == 400


def set_piece_slabs(monkeypatch: pytest.MonkeyPatch, piece_slabs: int) -> None:
    """Let loads whose memory is exchanged come in transfers of this size."""
    monkeypatch.setattr(loads, "PIECE_SLABS", piece_slabs)
    monkeypatch.setattr(loads, "MIN_PIECE_BLOCKS", 1)


def test_loads_take_the_place_of_what_they_evict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange what full memories hold, in pieces of one slab. In one piece, a load evicts what rests."""
    prompts = [pattern(seed, 640) for seed in range(3)]
    for piece_slabs, is_kept in ((1, True), (4, False)):
        set_piece_slabs(monkeypatch, piece_slabs)
        driver = Driver(num_slabs=5, lower_blocks=(200,))
        for prompt in prompts:
            driver.serve(prompt)
        evict_all(driver)
        lower = tier(driver)
        for number, prompt in enumerate([*prompts, *prompts]):
            driver.bring_back(prompt)
            if number == 0:
                lower.num_blocks = lower.num_used + 5
            assert driver.lookup(prompt).hit == 640 or not is_kept
        assert (lower.num_snapshots_evicted + lower.num_snapshots_refused == 0) is is_kept


def loading_in_pieces(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return a driver that loads a prompt in four transfers, beside which a prompt that begins alike rests."""
    set_piece_slabs(monkeypatch, 1)
    driver = Driver(blocks_per_slab=2, lower_blocks=(100,))
    driver.serve(PROMPT)
    driver.serve(FORK)
    evict_all(driver)
    assert driver.load_from_tier(PROMPT) is not None
    assert len(driver.device.loading) == 4
    return driver


FORK = [*PROMPT[:330], *pattern(9, 100)]


def test_pieces_are_published_together(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = loading_in_pieces(monkeypatch)
    for transfer in list(driver.device.loading)[::-1]:
        assert driver.lookup(PROMPT).hit == 0
        ended = driver.end_load(transfer, is_done=True)
    assert ended is not None
    assert ended.is_done
    assert driver.lookup(PROMPT).hit == 400
    assert (tier(driver).num_loads, driver.cache.stats().loads.num_done) == (1, 1)
    assert tier(driver).num_loaded_bytes == 7 + 2


@pytest.mark.parametrize("failing", range(4))
def test_nothing_is_published_if_a_piece_fails(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = loading_in_pieces(monkeypatch)
    for index, transfer in enumerate(list(driver.device.loading)):
        ended = driver.end_load(transfer, is_done=index != failing)
    assert ended is not None
    assert not ended.is_done
    assert driver.lookup(PROMPT).hit == 0
    assert (driver.cache.memory_use().num_blocks, tier(driver).num_used) == (0, 0), "the fork needs what is lost"
    assert driver.serve(FORK).hit == 0


def test_what_needs_returning_blocks_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = loading_in_pieces(monkeypatch)
    tokens = TokenBuffer(FORK)
    offer = driver.loads.tier_offer(tokens)
    assert offer is not None
    assert driver.load(FORK, offer) is None, "some of its blocks are nowhere"
    lead = driver.loads.find_shared(tokens, offer)
    assert lead is not None
    assert lead.position >= 320
    for transfer in list(driver.device.loading):
        driver.end_load(transfer, is_done=True)
    assert driver.bring_back(FORK)
    assert (driver.lookup(FORK).hit, tier(driver).num_used) == (430, 2 + 1), "the snapshot where they fork rests"


def test_all_pieces_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = loading_in_pieces(monkeypatch)
    lead = driver.cache.find_leader(TokenBuffer(PROMPT))
    assert lead is not None
    first, *others = driver.device.loading
    driver.end_load(first, is_done=True)
    driver.loads.cancel(lead)
    driver.flush()
    assert driver.device.cancelled == set(others)


def test_no_snapshot_saves_tokens_that_another_one_saves() -> None:
    driver = Driver(lower_blocks=(100,))
    for num_tokens in (128, 256, 384):
        driver.serve(PROMPT[:num_tokens])
    memory = driver.cache.internals().memory
    of = {snapshot.position: snapshot for _, _, snapshot in published_snapshots(driver.cache)}
    for position in (384, 128, 256):
        memory.drop_snapshot(of[position])
    driver.flush()
    saved = {demoted.position: demoted.saved_tokens for demoted in tier(driver).snapshots()}
    assert saved == {128: 128, 256: 128, 384: 128}
    [middle] = [demoted for demoted in tier(driver).snapshots() if demoted.position == 256]
    tier(driver).evict(middle)
    driver.flush()
    saved = {demoted.position: demoted.saved_tokens for demoted in tier(driver).snapshots()}
    assert saved == {128: 128, 384: 256}


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_path_ends_at_the_snapshot_above_the_last_one(is_loaded: bool) -> None:
    driver = Driver(lower_blocks=(100,))
    deepest, other = PROMPT[:200], [*PROMPT[:64], *[3] * 60]
    for prompt in (PROMPT[:100], other, deepest):
        driver.serve(prompt)
    evict_all(driver)
    of = {demoted.position: demoted for demoted in tier(driver).snapshots()}
    of[100].is_interior, of[124].is_interior = not is_loaded, True
    if is_loaded:
        assert driver.bring_back(deepest)
    else:
        tier(driver).evict(of[200])
    assert (of[100].is_interior, of[124].is_interior) == (is_loaded, True)


def test_a_load_frees_blocks_that_were_computed_again() -> None:
    driver, longer = Driver(lower_blocks=(100,)), [*PROMPT, *pattern(9, 200)]
    for prompt in (PROMPT, longer):
        driver.serve(prompt)
    evict_all(driver)
    driver.serve(PROMPT[:192])
    num_used = tier(driver).num_used
    assert driver.bring_back(PROMPT)
    assert [demoted.position for demoted in tier(driver).snapshots()] == [600]
    assert (num_used, tier(driver).num_used) == (9 + 2 * (5 + 1), 3 + 5 + 1)


def test_the_next_snapshot_saves_what_a_failed_load_has_lost() -> None:
    driver = Driver(lower_blocks=(100,))
    for num_tokens in (128, 256, 384):
        driver.serve(PROMPT[:num_tokens])
    for _, _, snapshot in list(published_snapshots(driver.cache)):
        driver.cache.internals().memory.drop_snapshot(snapshot)
    driver.flush()
    assert driver.load_from_tier(PROMPT[:256]) is not None
    driver.end_load(tier_transfer(driver), is_done=False)
    saved = {demoted.position: demoted.saved_tokens for demoted in tier(driver).snapshots()}
    assert saved == {128: 128, 384: 256}


def test_uses_are_remembered_in_a_tier_and_after_a_return() -> None:
    driver = evicted()
    driver.serve(PROMPT)
    [(_, _, snapshot)] = published_snapshots(driver.cache)
    again = snapshot.use
    evict_all(driver)
    [demoted] = tier(driver).snapshots()
    assert demoted.use == again
    demoted.use = Use(again.at, again.interarrival_bin + 1)
    assert driver.bring_back(PROMPT)
    [(_, _, snapshot)] = published_snapshots(driver.cache)
    assert snapshot.use == (again.at, again.interarrival_bin + 1)


@pytest.mark.parametrize(
    ("costs", "pays"),
    [
        (LoadCosts(), True),
        (LoadCosts(bytes_per_s=1e6), True),
        (LoadCosts(token_s=1e-3), True),
        (LoadCosts(0.0, 1e6, 2e-2), True),
        (LoadCosts(0.0, 1e6, 1e-3), False),
        (LoadCosts(0.5, 1e9, 1e-3), False),
        (LoadCosts(0.05, 1e9, 1e-3), True),
    ],
)
def test_loads_pay_where_computing_takes_longer(costs: LoadCosts, *, pays: bool) -> None:
    assert costs.pays(1_000_000, 100) is pays


def test_costs_follow_measurements() -> None:
    costs = LoadCosts()
    costs.observe_load(1000, 0.0)
    costs.observe_prefill(63, 1.0)
    assert (costs.bytes_per_s, costs.token_s) == (None, None)
    costs.observe_load(1000, 1.0)
    costs.observe_load(3000, 1.0)
    costs.observe_prefill(100, 1.0)
    assert costs.bytes_per_s == pytest.approx(1200)
    assert costs.token_s == pytest.approx(0.01)


def test_one_slow_load_does_not_end_loading() -> None:
    costs = LoadCosts()
    costs.observe_prefill(1000, 1.0)
    costs.observe_load(1_000_000, 100.0)
    assert not costs.pays(1_000_000, 1000)
    num_prefills = 0
    while not costs.pays(1_000_000, 1000):
        costs.observe_prefill(1000, 1.0)
        num_prefills += 1
    assert num_prefills == 99 * PREFILLS_PER_LOSS + 1, "the load may lose 1/64 of the time that prompts took since"
    costs.observe_load(1_000_000, 0.001)
    assert costs.pays(1_000_000, 1000)


def test_slow_stores_are_seldom_tried() -> None:
    costs = LoadCosts()
    costs.observe_load(1_000_000, 10.0)
    lost_s, num_loads, num_prefills = 0.0, 0, 10_000
    for _ in range(num_prefills):
        costs.observe_prefill(1000, 1.0)
        if costs.pays(1_000_000, 1000):
            costs.observe_load(1_000_000, 10.0)
            lost_s += 9.0
            num_loads += 1
    assert num_loads > 10
    assert lost_s <= num_prefills / PREFILLS_PER_LOSS


def test_stores_that_fail_slowly_are_left_alone_for_a_while() -> None:
    costs = LoadCosts()
    costs.observe_prefill(1000, 1.0)
    costs.observe_load(1_000_000, 0.001)
    costs.observe_failure(2.0)
    num_prefills = 0
    while not costs.pays(1_000_000, 1000):
        costs.observe_prefill(1000, 1.0)
        num_prefills += 1
    assert num_prefills == 2 * PREFILLS_PER_LOSS + 1
    costs.observe_load(1_000_000, 0.001)
    assert costs.pays(1_000_000, 1000)


def test_loads_are_given_up_when_computing_would_have_ended() -> None:
    costs = LoadCosts()
    assert costs.limit_s(10_000) == FIRST_LIMIT_S
    costs.observe_prefill(1000, 1.0)
    costs.observe_load(1_000_000, 0.001)
    assert costs.limit_s(10_000) == pytest.approx(10.0)
    assert costs.limit_s(10) == LEAST_LIMIT_S
    costs.observe_prefill(6400, 64.0)
    assert costs.limit_s(10_000) > 10 * costs.token_s * 1000, "a new measurement may take longer"


@pytest.mark.parametrize("index", [0, 1])
def test_only_loads_from_persistent_tiers_are_given_up(index: int) -> None:
    driver = Driver(lower_blocks=(13, 100) if index else (100,))
    driver.serve(PROMPT)
    evict_all(driver)
    while driver.end_spill():
        pass
    offer = driver.loads.tier_offer(TokenBuffer(PROMPT))
    assert offer is not None
    assert offer.limit_s == (FIRST_LIMIT_S if index else float("inf"))
    assert driver.loads.begin(TokenBuffer(PROMPT), offer) is not None
    assert {action.limit_s for action in driver.cache.take_actions() if isinstance(action, LoadIn)} == {offer.limit_s}


@pytest.mark.parametrize("index", [0, 1])
def test_tiers_that_were_slow_once_are_measured_again(index: int) -> None:
    driver = Driver(lower_blocks=(13, 100) if index else (100,))
    driver.serve(PROMPT)
    evict_all(driver)
    while driver.end_spill():
        pass
    measured = driver.loads.tiers[index]
    measured.costs.observe_load(1, 1.0)
    driver.loads.observe_prefill(1000, 1.0)
    assert driver.loads.tier_offer(TokenBuffer(PROMPT)) is None
    for _ in range(1000 * PREFILLS_PER_LOSS):
        driver.loads.observe_prefill(1000, 1.0)
    assert driver.bring_back(PROMPT)
    assert measured.num_loads == 1


def test_resting_slots_take_the_blocks_of_their_encoding() -> None:
    driver = Driver(lower_blocks=(100,), lower_snapshots=SnapshotSize(2, 1))
    driver.serve(PROMPT)
    evict_all(driver)
    assert tier(driver).num_used == 6 + 1 + 2
    assert driver.bring_back(PROMPT)
    assert driver.lookup(PROMPT).hit == 400
    assert tier(driver).num_used == 0
