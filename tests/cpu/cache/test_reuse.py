"""When sequences come back: what counts as a return, what is learned from it, and how much is remembered."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.cache import reuse
from strandline.cache.outcomes import EDGES, PRIOR_DENSITIES, PRIOR_RETURNS, WIDTHS, Outcomes, bin_of, next_edge
from strandline.cache.reuse import TICKS_PER_S, ReuseHistory
from strandline.cache.tokens import encode
from strandline.cache.use import NO_INTERARRIVAL, interarrival_bin
from tests.cpu.cache.test_lookup import prompt

NUM_BINS = len(EDGES)


def data(tokens: list[int]) -> bytearray:
    return bytearray(encode(tokens))


def leave(history: ReuseHistory, tokens: list[int], *, salt: str = "", habit: int = NO_INTERARRIVAL) -> None:
    history.leave(salt, data(tokens), len(tokens), len(tokens), habit)


def away(history: ReuseHistory, num_admissions: int) -> None:
    for _ in range(num_admissions):
        history.tick()


@pytest.mark.parametrize("num_tokens", [64, 65, 300, 1000, 5000])
def test_a_path_that_comes_back_is_known_by_how_long_it_was_away(num_tokens: int) -> None:
    history = ReuseHistory()
    leave(history, prompt(num_tokens))
    away(history, 20)
    assert history.come_back("", data(prompt(num_tokens + 50))) == interarrival_bin(20)
    assert history.come_back("", data(prompt(num_tokens + 50))) == NO_INTERARRIVAL


def test_seconds_age_a_path_as_admissions_do() -> None:
    now_s = 100.0
    history = ReuseHistory(lambda: now_s)
    leave(history, prompt(300))
    now_s += 60
    away(history, 3)
    assert history.come_back("", data(prompt(350))) == interarrival_bin(3 + 60 * TICKS_PER_S)


def test_a_prompt_that_rewinds_a_little_returns_and_one_that_parts_early_does_not() -> None:
    history = ReuseHistory()
    leave(history, prompt(1000))
    assert history.come_back("", data(prompt(700) + prompt(400, 50_000))) == NO_INTERARRIVAL
    assert history.come_back("", data(prompt(900) + prompt(10, 50_000))) != NO_INTERARRIVAL


def test_of_paths_that_begin_alike_the_one_that_is_continued_returns() -> None:
    history = ReuseHistory()
    paths = [prompt(600) + prompt(300, 50_000 * (index + 1)) for index in range(4)]
    for index, path in enumerate(paths):
        away(history, 2**index)
        leave(history, path)
    assert history.come_back("", data(paths[1])) == interarrival_bin(4 + 8)
    assert history.come_back("", data(paths[3])) == interarrival_bin(0)


def test_other_salts_are_strangers() -> None:
    history = ReuseHistory()
    leave(history, prompt(500), salt="a")
    assert history.come_back("b", data(prompt(500))) == NO_INTERARRIVAL
    assert history.come_back("a", data(prompt(500))) != NO_INTERARRIVAL


def test_what_was_used_longest_ago_is_worth_least_before_anything_was_observed() -> None:
    history = ReuseHistory()
    densities = [history.density(NO_INTERARRIVAL, age) for age in (0, 1, 3, 10, 100, 10_000, 500_000)]
    assert densities == sorted(densities, reverse=True)
    assert len(set(densities)) == len(densities)


def test_a_path_is_worth_most_when_it_is_about_to_return() -> None:
    history = ReuseHistory()
    for index in range(600):
        leave(history, prompt(100, 1000 * index))
        away(history, 32)
        assert history.come_back("", data(prompt(100, 1000 * index))) == interarrival_bin(32)
    before, due, overdue = (history.density(NO_INTERARRIVAL, age) for age in (0, 31, 200))
    assert overdue < before < due


def test_habits_are_told_apart() -> None:
    history = ReuseHistory()
    for index in range(600):
        quick, slow = prompt(100, 2000 * index), prompt(100, 2000 * index + 1000)
        leave(history, slow, habit=interarrival_bin(200))
        leave(history, quick, habit=interarrival_bin(2))
        away(history, 2)
        history.come_back("", data(quick))
        away(history, 198)
        history.come_back("", data(slow))
    assert history.density(interarrival_bin(2), 1) > 10 * history.density(interarrival_bin(200), 1)
    assert history.density(interarrival_bin(2), 150) < history.density(interarrival_bin(200), 150)


def test_a_habit_that_was_never_seen_is_judged_by_those_next_to_it() -> None:
    history = ReuseHistory()
    for index in range(600):
        quick, slow = prompt(100, 2000 * index), prompt(100, 2000 * index + 1000)
        leave(history, slow, habit=interarrival_bin(200))
        leave(history, quick, habit=interarrival_bin(2))
        away(history, 2)
        history.come_back("", data(quick))
        away(history, 198)
        history.come_back("", data(slow))
    like_quick, like_slow, like_none = interarrival_bin(4), interarrival_bin(400), interarrival_bin(2**18)
    assert history.density(like_quick, 1) > 2 * history.density(like_none, 1) > 4 * history.density(like_slow, 1)
    assert history.density(NO_INTERARRIVAL, 1) == pytest.approx(history.density(like_none, 1))


@given(st.lists(st.tuples(st.sampled_from([NO_INTERARRIVAL, *range(2, 8)]), st.integers(0, 300)), max_size=40))
def test_what_is_expected_of_a_habit_is_its_own_some_of_all_and_a_quarter_of_its_neighbours(
    seen: list[tuple[int, int]],
) -> None:
    history = ReuseHistory()
    for index, (habit, age) in enumerate(seen):
        leave(history, prompt(100, 1000 * index), habit=habit)
        away(history, age)
        history.come_back("", data(prompt(100, 1000 * index)))
    counts = [sum(seen_habit == habit for seen_habit, _ in seen) for habit in range(10)]
    for habit in range(2, 9):
        alike = sum(counts[other] for other in (habit - 1, habit + 1) if other > 1)
        expected = counts[habit] + reuse.NUM_BORROWED + reuse.NEIGHBOURS_SHARE * alike
        assert history._expected_of(habit).total == pytest.approx(expected)


def test_paths_that_never_return_count_once_they_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MAX_PATHS", 50)
    history, other = ReuseHistory(), ReuseHistory()
    for index in range(600):
        history.tick()
        leave(history, prompt(100, 1000 * index))
    assert len(history) == 50
    assert history.density(NO_INTERARRIVAL, 0) < 0.1 * other.density(NO_INTERARRIVAL, 0)


def test_only_so_many_paths_that_begin_alike_are_remembered() -> None:
    history = ReuseHistory()
    for index in range(100):
        leave(history, prompt(64) + prompt(10, 1000 * (index + 1)))
    assert len(history) == reuse.MAX_ALIKE


@given(st.integers(0, 3_000_000))
def test_ages_lie_in_their_bins(age: int) -> None:
    index = bin_of(age)
    assert EDGES[index] <= age
    if index == NUM_BINS - 1:
        return
    assert age < EDGES[index + 1]
    assert bin_of(next_edge(age)) == index + 1
    assert bin_of(next_edge(age) - 1) == index


counts = st.lists(st.integers(0, 5), min_size=NUM_BINS, max_size=NUM_BINS)


@given(counts, counts)
def test_a_density_is_the_best_over_all_times_to_give_up(returns: list[int], losses: list[int]) -> None:
    outcomes = Outcomes()
    outcomes.returns = [count + 0.01 for count in returns]
    outcomes.losses = [float(count) for count in losses]
    gone = [a + b for a, b in zip(outcomes.returns, outcomes.losses, strict=True)]
    times = [(sum(gone[i + 1 :]) + gone[i] / 2) * WIDTHS[i] for i in range(NUM_BINS)]
    for index, density in enumerate(outcomes.densities()):
        ends = range(index + 1, NUM_BINS + 1)
        best = max(sum(outcomes.returns[index:end]) / sum(times[index:end]) for end in ends)
        assert density == pytest.approx(best)


@pytest.mark.parametrize("num_generated", [1, 40, 64, 300])
def test_what_prompts_go_on_from_is_learned_from_returns_whether_or_not_anything_was_cached(num_generated: int) -> None:
    at_end, inside = ReuseHistory(), ReuseHistory()
    for index in range(100):
        asked, said = prompt(200, 1000 * index), prompt(num_generated, 200_000 + 1000 * index)
        for history, kept in ((at_end, said), (inside, [])):
            tokens = data(asked + said)
            history.leave("", tokens, len(asked), len(asked + said), NO_INTERARRIVAL)
            away(history, 5)
            assert history.come_back("", data(asked + kept + prompt(90, 400_000 + 1000 * index))) == interarrival_bin(5)
    assert inside.density_of_prompt(NO_INTERARRIVAL, 1) > 50 * at_end.density_of_prompt(NO_INTERARRIVAL, 1)


def test_rewinds_make_what_lies_inside_a_path_worth_more_and_its_prompts_end_less() -> None:
    rewinds, continues = ReuseHistory(), ReuseHistory()
    for index in range(100):
        asked, said = prompt(1000, 10_000 * index), prompt(50, 5_000_000 + 1000 * index)
        for history, kept in ((rewinds, asked[:900]), (continues, asked)):
            history.leave("", data(asked + said), len(asked), len(asked + said), NO_INTERARRIVAL)
            away(history, 5)
            assert history.come_back("", data(kept + prompt(90, 9_000_000 + 1000 * index))) == interarrival_bin(5)
    assert rewinds.density_of_inner(NO_INTERARRIVAL, 1) > 10 * rewinds.density_of_prompt(NO_INTERARRIVAL, 1)
    assert continues.density_of_prompt(NO_INTERARRIVAL, 1) > 10 * continues.density_of_inner(NO_INTERARRIVAL, 1)


@pytest.mark.parametrize(("num_shared", "num_own"), [(200, 40), (600, 90), (4096, 900)])
def test_prompts_that_only_begin_alike_do_not_return(num_shared: int, num_own: int) -> None:
    history = ReuseHistory()
    for index in range(10):
        tokens = prompt(num_shared) + prompt(num_own, 50_000 * (index + 1))
        assert history.come_back("", data(tokens)) == NO_INTERARRIVAL
        leave(history, tokens)


def test_a_beginning_that_several_paths_share_almost_to_their_ends_is_nobodys_return() -> None:
    history = ReuseHistory()
    for index in range(2):
        leave(history, prompt(4096) + prompt(20, 50_000 * (index + 1)))
    assert history.come_back("", data(prompt(4096) + prompt(20, 500_000))) == NO_INTERARRIVAL


def test_of_a_path_repeated_whole_and_a_later_one_left_before_its_end_the_first_returns() -> None:
    history = ReuseHistory()
    whole = prompt(1000) + prompt(30, 50_000)
    leave(history, whole)
    away(history, 100)
    leave(history, prompt(1000) + prompt(30, 90_000))
    away(history, 3)
    assert history.come_back("", data(whole + prompt(10, 70_000))) == interarrival_bin(103)


def test_what_does_not_come_back_is_worth_little_long_before_it_is_forgotten() -> None:
    history = ReuseHistory()
    for index in range(100):
        quick = prompt(100, 1000 * index)
        leave(history, prompt(100, 500_000 + 1000 * index))
        leave(history, quick)
        away(history, 2)
        assert history.come_back("", data(quick)) == interarrival_bin(2)
    assert len(history) == 100
    assert history.density(NO_INTERARRIVAL, 20) < 0.01 * history.density(NO_INTERARRIVAL, 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=60))
def test_every_path_counts_once_whether_it_is_away_or_came_back(steps: list[tuple[bool, int]]) -> None:
    history = ReuseHistory()
    prior = history._with_those_away()[reuse.EVERY_HABIT].total
    for index, (returns, age) in enumerate(steps):
        leave(history, prompt(100, 1000 * index))
        away(history, age)
        if returns:
            assert history.come_back("", data(prompt(100, 1000 * index))) == interarrival_bin(age)
    seen = history._with_those_away()
    assert seen[reuse.EVERY_HABIT].total == pytest.approx(prior + len(steps))
    assert sum(seen[reuse.EVERY_HABIT].returns) - sum(PRIOR_RETURNS) == pytest.approx(sum(r for r, _ in steps))
    assert sum(o.total for habit, o in seen.items() if habit != reuse.EVERY_HABIT) == pytest.approx(len(steps))


@given(st.integers(1, 60), st.integers(1, 20))
def test_of_many_paths_that_are_away_some_are_counted_for_all(num_away: int, most: int) -> None:
    history = ReuseHistory()
    prior = history._with_those_away()[reuse.EVERY_HABIT].total
    for index in range(num_away):
        leave(history, prompt(100, 1000 * index))
        history.tick()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse, "MAX_COUNTED", most)
        counted = history._with_those_away()[reuse.EVERY_HABIT].total - prior
    assert num_away - 0.01 <= counted < num_away + max(num_away / most, 1) + 1


def test_observations_fade_by_when_their_paths_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "HALF_LIFE", 10)
    history = ReuseHistory()
    prior = sum(PRIOR_RETURNS)
    leave(history, prompt(100, 900_000))
    for index in range(10):
        leave(history, prompt(100, 1000 * index))
        history.come_back("", data(prompt(100, 1000 * index)))
    assert sum(history._with_those_away()[reuse.EVERY_HABIT].returns) == pytest.approx((prior + 10) / 2)
    history.come_back("", data(prompt(100, 900_000)))
    assert sum(history._with_those_away()[reuse.EVERY_HABIT].returns) == pytest.approx((prior + 10 + 1) / 2)


def test_the_more_hits_land_where_a_path_goes_on_the_more_such_snapshots_are_worth() -> None:
    few, many = ReuseHistory(), ReuseHistory()
    for _ in range(100):
        few.count_hit(0)
        many.count_hit(1)
    rates = [history.density_of_inner(NO_INTERARRIVAL, 5) for history in (few, ReuseHistory(), many)]
    assert rates == sorted(set(rates))
    assert many.density_of_inner(NO_INTERARRIVAL, 50) < many.density_of_inner(NO_INTERARRIVAL, 5)


def test_hits_that_are_no_paths_return_say_nothing_of_which_end_paths_go_on_from() -> None:
    history = ReuseHistory()
    before = history.density_of_answer(NO_INTERARRIVAL, 5), history.density_of_prompt(NO_INTERARRIVAL, 5)
    for num_continuations in (0, 1, 2, 2):
        history.count_hit(num_continuations)
    assert (
        history.density_of_answer(NO_INTERARRIVAL, 5),
        history.density_of_prompt(NO_INTERARRIVAL, 5),
    ) == pytest.approx(before)


def test_before_anything_returns_either_end_of_a_path_is_as_likely_to_be_gone_on_from() -> None:
    history = ReuseHistory()
    either = history.density_of_answer(NO_INTERARRIVAL, 5)
    assert either == pytest.approx(history.density(NO_INTERARRIVAL, 5) / 2)
    assert history.density_of_prompt(NO_INTERARRIVAL, 5) == pytest.approx(either)


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 5000))
def test_ends_of_prompts_and_of_answers_share_what_returns(repeats_answer: list[bool], age: int) -> None:
    history = ReuseHistory()
    for index, repeats in enumerate(repeats_answer):
        asked, said = prompt(100, 1000 * index), prompt(20, 200_000 + 1000 * index)
        history.leave("", data(asked + said), len(asked), len(asked + said), NO_INTERARRIVAL)
        away(history, 5)
        history.come_back("", data(asked + (said if repeats else []) + prompt(90, 400_000 + 1000 * index)))
    returns = history.density(NO_INTERARRIVAL, age)
    assert history.density_of_answer(NO_INTERARRIVAL, age) <= returns
    either = history.density_of_answer(NO_INTERARRIVAL, age) + history.density_of_prompt(NO_INTERARRIVAL, age)
    assert either >= returns * (1 - 1e-9)
    assert history.density_of_prompt(NO_INTERARRIVAL, age) <= max(returns, PRIOR_DENSITIES[bin_of(age)])


def test_what_is_shared_falls_with_the_square_of_its_age_once_that_exceeds_the_time_before() -> None:
    history = ReuseHistory()
    habit = interarrival_bin(8)
    rates = [history.density_of_shared(habit, age) for age in (0, 16, 33, 67, 135)]
    assert rates[0] == rates[1]
    assert [earlier / later for earlier, later in pairwise(rates[2:])] == pytest.approx([4, 4])
    assert history.density_of_shared(NO_INTERARRIVAL, 71) == pytest.approx(
        history.density_of_shared(NO_INTERARRIVAL, 35) / 2
    )
