"""Earlier answers are found under their salt alone, until newer ones of that salt take their place."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.engine.drafting.earlier_answers import EarlierAnswers
from strandline.records.tokens import encode

SALTS = ("", "a", "b")
LAST = [1, 2, 3]


def finds(answers: EarlierAnswers, salt: str, last: list[int], max_tokens: int = 4) -> list[bytes]:
    index = answers.index_of(salt)
    return [] if index is None else index.find(encode(last), max_tokens).continuations


@given(
    added=st.lists(st.tuples(st.sampled_from(SALTS), st.integers(0, 30)), max_size=60),
    max_requests=st.integers(0, 6),
    max_tokens=st.integers(16, 90),
)
def test_each_salt_has_its_latest_answers_alone(
    added: list[tuple[str, int]], max_requests: int, max_tokens: int
) -> None:
    answers = EarlierAnswers(max_requests, max_salt_tokens=max_tokens)
    expected: dict[str, deque[list[int]]] = {salt: deque() for salt in SALTS}
    for number, (salt, length) in enumerate(added):
        # Each answer goes on in a way of its own.
        answer = [*LAST, 100 + number, *range(1000, 1000 + length)][-(max_tokens - 1) :]
        answers.add(salt, answer)
        kept = expected[salt]
        kept.append(answer)
        while len(kept) > max_requests or sum(len(each) + 1 for each in kept) > max_tokens:
            kept.popleft()
        for other in SALTS:
            following = [answer[3:4] for answer in reversed(expected[other]) if answer[:3] == LAST]
            assert finds(answers, other, LAST, max_tokens=1) == [encode(tokens) for tokens in following[:16]]


def test_matches_end_where_an_answer_begins() -> None:
    answers = EarlierAnswers(10)
    answers.add("", [7, 8, 9])
    answers.add("", [*LAST, 4])
    index = answers.index_of("")
    assert index is not None
    assert index.find(encode([8, 9, *LAST]), 1).num_tokens == len(LAST)


def test_other_salts_never_evict_single_answers() -> None:
    answers = EarlierAnswers(3, max_salt_tokens=100)
    answers.add("quiet", [*LAST, 50])
    for number in range(200):
        answers.add("busy", [*LAST, number, *range(1000, 1090)])
    assert finds(answers, "quiet", LAST, 1) == [encode([50])]
    assert len(finds(answers, "busy", LAST, 1)) == 1


def test_salt_unused_for_longest_goes_as_a_whole() -> None:
    answers = EarlierAnswers(100, max_salt_tokens=60, max_tokens=130)
    for salt in ("first", "second", "first", "third"):
        answers.add(salt, [*LAST, *range(10, 50)])
    assert finds(answers, "second", LAST) == []
    assert finds(answers, "first", LAST)
    assert finds(answers, "third", LAST)
    assert answers.num_tokens <= 130


def test_a_salt_above_every_limit_keeps_its_latest_answer() -> None:
    answers = EarlierAnswers(100, max_salt_tokens=60, max_tokens=10, max_salts=1)
    for number in range(5):
        answers.add(str(number), [*LAST, number])
        answers.add(str(number), [*range(100), *LAST, number])
        assert finds(answers, str(number), LAST, 1) == [encode([number])]


@settings(max_examples=settings().max_examples // 10)
@given(seed=st.integers(0, 1000))
def test_memory_is_bounded(seed: int) -> None:
    rng = random.Random(seed)
    answers = EarlierAnswers(10_000, max_salt_tokens=2000, max_tokens=5000, max_salts=20)
    for _ in range(500):
        answers.add(str(rng.randrange(40)), rng.choices(range(rng.choice([3, 1000])), k=rng.randrange(400)))
        assert answers.num_tokens <= 5000
        assert answers.num_bytes <= 60 * 5000 + 20 * 2048


def test_no_answers_are_kept_where_none_may_be() -> None:
    answers = EarlierAnswers(0)
    answers.add("", [*LAST, 4])
    assert answers.index_of("") is None
    assert answers.num_bytes == 0


@pytest.mark.parametrize("length", [0, 1, 2])
def test_answers_shorter_than_a_match_are_kept(length: int) -> None:
    answers = EarlierAnswers(10)
    answers.add("", [5] * length)
    answers.add("", [*LAST, 4])
    assert finds(answers, "", LAST, 1) == [encode([4])]
