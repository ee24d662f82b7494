"""Returns of paths: what counts as one, what is learned from it, and how much is remembered."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.cache.policy import reuse
from strandline.cache.policy.outcomes import (
    BIN_EDGES,
    BIN_WIDTHS,
    PRIOR_RATES,
    PRIOR_RETURNS,
    Outcomes,
    age_bin,
    next_bin_edge,
)
from strandline.cache.policy.reuse import TICKS_PER_S, ReuseHistory
from strandline.cache.use import NO_INTERARRIVAL, interarrival_bin
from strandline.records.tokens import encode
from tests.cpu.cache.test_lookup import prompt

NUM_BINS = len(BIN_EDGES)


def data(tokens: list[int]) -> bytearray:
    return bytearray(encode(tokens))


def leave(history: ReuseHistory, tokens: list[int], *, salt: str = "", past_bin: int = NO_INTERARRIVAL) -> None:
    history.record_departure(salt, data(tokens), len(tokens), len(tokens), past_bin)


def away(history: ReuseHistory, num_admissions: int) -> None:
    for _ in range(num_admissions):
        history.count_admission()


@pytest.mark.parametrize("num_tokens", [64, 65, 300, 1000, 5000])
def test_returning_path_gets_the_bin_of_its_time_away(num_tokens: int) -> None:
    history = ReuseHistory()
    leave(history, prompt(num_tokens))
    away(history, 20)
    assert history.record_return("", data(prompt(num_tokens + 50))) == interarrival_bin(20)
    assert history.record_return("", data(prompt(num_tokens + 50))) == NO_INTERARRIVAL


def test_seconds_count_as_admissions_in_the_time_away() -> None:
    now_s = 100.0
    history = ReuseHistory(lambda: now_s)
    leave(history, prompt(300))
    now_s += 60
    away(history, 3)
    assert history.record_return("", data(prompt(350))) == interarrival_bin(3 + 60 * TICKS_PER_S)


def test_short_rewind_is_a_return_and_early_divergence_is_not() -> None:
    history = ReuseHistory()
    leave(history, prompt(1000))
    assert history.record_return("", data(prompt(700) + prompt(400, 50_000))) == NO_INTERARRIVAL
    assert history.record_return("", data(prompt(900) + prompt(10, 50_000))) != NO_INTERARRIVAL


def test_only_the_continued_path_of_several_similar_ones_returns() -> None:
    history = ReuseHistory()
    paths = [prompt(600) + prompt(300, 50_000 * (index + 1)) for index in range(4)]
    for index, path in enumerate(paths):
        away(history, 2**index)
        leave(history, path)
    assert history.record_return("", data(paths[1])) == interarrival_bin(4 + 8)
    assert history.record_return("", data(paths[3])) == interarrival_bin(0)


def test_path_does_not_return_under_another_salt() -> None:
    history = ReuseHistory()
    leave(history, prompt(500), salt="a")
    assert history.record_return("b", data(prompt(500))) == NO_INTERARRIVAL
    assert history.record_return("a", data(prompt(500))) != NO_INTERARRIVAL


def test_prior_rate_falls_with_the_time_away() -> None:
    history = ReuseHistory()
    rates = [history.rate(NO_INTERARRIVAL, age) for age in (0, 1, 3, 10, 100, 10_000, 500_000)]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == len(rates)


def test_rate_peaks_before_the_usual_return() -> None:
    history = ReuseHistory()
    for index in range(600):
        leave(history, prompt(100, 1000 * index))
        away(history, 32)
        assert history.record_return("", data(prompt(100, 1000 * index))) == interarrival_bin(32)
    before, due, overdue = (history.rate(NO_INTERARRIVAL, age) for age in (0, 31, 200))
    assert overdue < before < due


def test_rates_differ_by_interarrival_bin() -> None:
    history = ReuseHistory()
    for index in range(600):
        quick, slow = prompt(100, 2000 * index), prompt(100, 2000 * index + 1000)
        leave(history, slow, past_bin=interarrival_bin(200))
        leave(history, quick, past_bin=interarrival_bin(2))
        away(history, 2)
        history.record_return("", data(quick))
        away(history, 198)
        history.record_return("", data(slow))
    assert history.rate(interarrival_bin(2), 1) > 10 * history.rate(interarrival_bin(200), 1)
    assert history.rate(interarrival_bin(2), 150) < history.rate(interarrival_bin(200), 150)


def test_unseen_bin_is_estimated_from_adjacent_bins() -> None:
    history = ReuseHistory()
    for index in range(600):
        quick, slow = prompt(100, 2000 * index), prompt(100, 2000 * index + 1000)
        leave(history, slow, past_bin=interarrival_bin(200))
        leave(history, quick, past_bin=interarrival_bin(2))
        away(history, 2)
        history.record_return("", data(quick))
        away(history, 198)
        history.record_return("", data(slow))
    like_quick, like_slow, like_none = interarrival_bin(4), interarrival_bin(400), interarrival_bin(2**18)
    assert history.rate(like_quick, 1) > 2 * history.rate(like_none, 1) > 4 * history.rate(like_slow, 1)
    assert history.rate(NO_INTERARRIVAL, 1) == pytest.approx(history.rate(like_none, 1))


@given(st.lists(st.tuples(st.sampled_from([NO_INTERARRIVAL, *range(2, 8)]), st.integers(0, 300)), max_size=40))
def test_estimate_weighs_own_pooled_and_adjacent_observations(
    seen: list[tuple[int, int]],
) -> None:
    history = ReuseHistory()
    for index, (past_bin, age) in enumerate(seen):
        leave(history, prompt(100, 1000 * index), past_bin=past_bin)
        away(history, age)
        history.record_return("", data(prompt(100, 1000 * index)))
    counts = [sum(seen_bin == past_bin for seen_bin, _ in seen) for past_bin in range(10)]
    for past_bin in range(2, 9):
        alike = sum(counts[other] for other in (past_bin - 1, past_bin + 1) if other > 1)
        expected = counts[past_bin] + reuse.POOLED_WEIGHT + reuse.NEIGHBOUR_WEIGHT * alike
        assert history._estimate(past_bin).total == pytest.approx(expected)


def test_forgotten_paths_count_as_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MAX_PATHS", 50)
    history, other = ReuseHistory(), ReuseHistory()
    for index in range(600):
        history.count_admission()
        leave(history, prompt(100, 1000 * index))
    assert len(history) == 50
    assert history.rate(NO_INTERARRIVAL, 0) < 0.1 * other.rate(NO_INTERARRIVAL, 0)


def test_remembered_paths_per_key_are_bounded() -> None:
    history = ReuseHistory()
    for index in range(100):
        leave(history, prompt(64) + prompt(10, 1000 * (index + 1)))
    assert len(history) == reuse.MAX_PATHS_PER_KEY


@given(st.integers(0, 3_000_000))
def test_ages_lie_in_their_bins(age: int) -> None:
    index = age_bin(age)
    assert BIN_EDGES[index] <= age
    if index == NUM_BINS - 1:
        return
    assert age < BIN_EDGES[index + 1]
    assert age_bin(next_bin_edge(age)) == index + 1
    assert age_bin(next_bin_edge(age) - 1) == index


counts = st.lists(st.integers(0, 5), min_size=NUM_BINS, max_size=NUM_BINS)


@given(counts, counts)
def test_rate_is_the_maximum_over_stopping_times(returns: list[int], losses: list[int]) -> None:
    outcomes = Outcomes()
    outcomes.returns = [count + 0.01 for count in returns]
    outcomes.losses = [float(count) for count in losses]
    gone = [a + b for a, b in zip(outcomes.returns, outcomes.losses, strict=True)]
    times = [(sum(gone[i + 1 :]) + gone[i] / 2) * BIN_WIDTHS[i] for i in range(NUM_BINS)]
    for index, rate in enumerate(outcomes.rates()):
        ends = range(index + 1, NUM_BINS + 1)
        best = max(sum(outcomes.returns[index:end]) / sum(times[index:end]) for end in ends)
        assert rate == pytest.approx(best)


@pytest.mark.parametrize("num_generated", [1, 40, 64, 300])
def test_resume_points_are_learned_from_returns_to_evicted_paths_too(num_generated: int) -> None:
    at_end, inside = ReuseHistory(), ReuseHistory()
    for index in range(100):
        asked, said = prompt(200, 1000 * index), prompt(num_generated, 200_000 + 1000 * index)
        for history, kept in ((at_end, said), (inside, [])):
            tokens = data(asked + said)
            history.record_departure("", tokens, len(asked), len(asked + said), NO_INTERARRIVAL)
            away(history, 5)
            assert history.record_return(
                "", data(asked + kept + prompt(90, 400_000 + 1000 * index))
            ) == interarrival_bin(5)
    assert inside.prompt_rate(NO_INTERARRIVAL, 1) > 50 * at_end.prompt_rate(NO_INTERARRIVAL, 1)


def test_rewinds_raise_interior_rate_and_lower_prompt_rate() -> None:
    rewinds, continues = ReuseHistory(), ReuseHistory()
    for index in range(100):
        asked, said = prompt(1000, 10_000 * index), prompt(50, 5_000_000 + 1000 * index)
        for history, kept in ((rewinds, asked[:900]), (continues, asked)):
            history.record_departure("", data(asked + said), len(asked), len(asked + said), NO_INTERARRIVAL)
            away(history, 5)
            assert history.record_return("", data(kept + prompt(90, 9_000_000 + 1000 * index))) == interarrival_bin(5)
    assert rewinds.interior_rate(NO_INTERARRIVAL, 1) > 10 * rewinds.prompt_rate(NO_INTERARRIVAL, 1)
    assert continues.prompt_rate(NO_INTERARRIVAL, 1) > 10 * continues.interior_rate(NO_INTERARRIVAL, 1)


@pytest.mark.parametrize(("num_shared", "num_own"), [(200, 40), (600, 90), (4096, 900)])
def test_sharing_a_short_prefix_is_no_return(num_shared: int, num_own: int) -> None:
    history = ReuseHistory()
    for index in range(10):
        tokens = prompt(num_shared) + prompt(num_own, 50_000 * (index + 1))
        assert history.record_return("", data(tokens)) == NO_INTERARRIVAL
        leave(history, tokens)


def test_prefix_shared_by_several_paths_is_no_return() -> None:
    history = ReuseHistory()
    for index in range(2):
        leave(history, prompt(4096) + prompt(20, 50_000 * (index + 1)))
    assert history.record_return("", data(prompt(4096) + prompt(20, 500_000))) == NO_INTERARRIVAL


def test_wholly_repeated_path_returns_before_a_later_rewound_one() -> None:
    history = ReuseHistory()
    whole = prompt(1000) + prompt(30, 50_000)
    leave(history, whole)
    away(history, 100)
    leave(history, prompt(1000) + prompt(30, 90_000))
    away(history, 3)
    assert history.record_return("", data(whole + prompt(10, 70_000))) == interarrival_bin(103)


def test_paths_away_lower_the_rate_before_they_are_forgotten() -> None:
    history = ReuseHistory()
    for index in range(100):
        quick = prompt(100, 1000 * index)
        leave(history, prompt(100, 500_000 + 1000 * index))
        leave(history, quick)
        away(history, 2)
        assert history.record_return("", data(quick)) == interarrival_bin(2)
    assert len(history) == 100
    assert history.rate(NO_INTERARRIVAL, 20) < 0.01 * history.rate(NO_INTERARRIVAL, 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=60))
def test_every_path_counts_once_away_or_returned(steps: list[tuple[bool, int]]) -> None:
    history = ReuseHistory()
    prior = history._with_censored()[reuse.ALL_BINS].total
    for index, (returns, age) in enumerate(steps):
        leave(history, prompt(100, 1000 * index))
        away(history, age)
        if returns:
            assert history.record_return("", data(prompt(100, 1000 * index))) == interarrival_bin(age)
    seen = history._with_censored()
    assert seen[reuse.ALL_BINS].total == pytest.approx(prior + len(steps))
    assert sum(seen[reuse.ALL_BINS].returns) - sum(PRIOR_RETURNS) == pytest.approx(sum(r for r, _ in steps))
    assert sum(o.total for past_bin, o in seen.items() if past_bin != reuse.ALL_BINS) == pytest.approx(len(steps))


@given(st.integers(1, 60), st.integers(1, 20))
def test_many_paths_away_are_sampled(num_away: int, most: int) -> None:
    history = ReuseHistory()
    prior = history._with_censored()[reuse.ALL_BINS].total
    for index in range(num_away):
        leave(history, prompt(100, 1000 * index))
        history.count_admission()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse, "MAX_PATHS_COUNTED", most)
        counted = history._with_censored()[reuse.ALL_BINS].total - prior
    assert num_away - 0.01 <= counted < num_away + max(num_away / most, 1) + 1


def test_observations_are_halved_by_the_departure_of_their_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "HALF_LIFE_OBSERVATIONS", 10)
    history = ReuseHistory()
    prior = sum(PRIOR_RETURNS)
    leave(history, prompt(100, 900_000))
    for index in range(10):
        leave(history, prompt(100, 1000 * index))
        history.record_return("", data(prompt(100, 1000 * index)))
    assert sum(history._with_censored()[reuse.ALL_BINS].returns) == pytest.approx((prior + 10) / 2)
    history.record_return("", data(prompt(100, 900_000)))
    assert sum(history._with_censored()[reuse.ALL_BINS].returns) == pytest.approx((prior + 10 + 1) / 2)


def test_interior_hits_raise_the_interior_rate() -> None:
    few, many = ReuseHistory(), ReuseHistory()
    for _ in range(100):
        few.count_hit(0)
        many.count_hit(1)
    rates = [history.interior_rate(NO_INTERARRIVAL, 5) for history in (few, ReuseHistory(), many)]
    assert rates == sorted(set(rates))
    assert many.interior_rate(NO_INTERARRIVAL, 50) < many.interior_rate(NO_INTERARRIVAL, 5)


def test_shared_hits_do_not_change_the_end_shares() -> None:
    history = ReuseHistory()
    before = history.answer_rate(NO_INTERARRIVAL, 5), history.prompt_rate(NO_INTERARRIVAL, 5)
    for num_continuations in (0, 1, 2, 2):
        history.count_hit(num_continuations)
    assert (
        history.answer_rate(NO_INTERARRIVAL, 5),
        history.prompt_rate(NO_INTERARRIVAL, 5),
    ) == pytest.approx(before)


def test_prior_gives_both_ends_of_a_path_equal_shares() -> None:
    history = ReuseHistory()
    either = history.answer_rate(NO_INTERARRIVAL, 5)
    assert either == pytest.approx(history.rate(NO_INTERARRIVAL, 5) / 2)
    assert history.prompt_rate(NO_INTERARRIVAL, 5) == pytest.approx(either)


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 5000))
def test_prompt_and_answer_rates_share_the_returns(repeats_answer: list[bool], age: int) -> None:
    history = ReuseHistory()
    for index, repeats in enumerate(repeats_answer):
        asked, said = prompt(100, 1000 * index), prompt(20, 200_000 + 1000 * index)
        history.record_departure("", data(asked + said), len(asked), len(asked + said), NO_INTERARRIVAL)
        away(history, 5)
        history.record_return("", data(asked + (said if repeats else []) + prompt(90, 400_000 + 1000 * index)))
    returns = history.rate(NO_INTERARRIVAL, age)
    assert history.answer_rate(NO_INTERARRIVAL, age) <= returns
    either = history.answer_rate(NO_INTERARRIVAL, age) + history.prompt_rate(NO_INTERARRIVAL, age)
    assert either >= returns * (1 - 1e-9)
    assert history.prompt_rate(NO_INTERARRIVAL, age) <= max(returns, PRIOR_RATES[age_bin(age)])


def test_shared_rate_falls_quadratically_after_the_last_interarrival_time() -> None:
    history = ReuseHistory()
    past_bin = interarrival_bin(8)
    rates = [history.shared_rate(past_bin, age) for age in (0, 16, 33, 67, 135)]
    assert rates[0] == rates[1]
    assert [earlier / later for earlier, later in pairwise(rates[2:])] == pytest.approx([4, 4])
    assert history.shared_rate(NO_INTERARRIVAL, 71) == pytest.approx(history.shared_rate(NO_INTERARRIVAL, 35) / 2)
