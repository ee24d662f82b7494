"""Suites are reproducible and spread over the lengths; scoring accepts right answers and nothing else."""

import pytest

from strandline.bench.evaluate import make_suite, score
from strandline.demo.tasks import KINDS, Kind, Task


def task(kind: Kind, answer: str) -> Task:
    return Task(kind, ({"role": "user", "content": "?"},), answer, "")


def test_a_suite_is_fixed_by_its_seed() -> None:
    assert make_suite(3, 5) == make_suite(3, 5)
    assert make_suite(3, 5) != make_suite(4, 5)


def test_suite_holds_the_requested_number_of_each_kind() -> None:
    kinds = [t.kind for t in make_suite(0, 7)]
    assert kinds == [kind for kind in KINDS for _ in range(7)]


def test_recall_prompts_are_spread_over_the_lengths() -> None:
    sizes = [sum(len(m["content"]) for m in t.messages) for t in make_suite(0, 8) if t.kind == "recall"]
    assert sizes[0] < 3000
    assert sizes[-1] > 7000


def test_every_reference_reply_scores() -> None:
    assert all(score(t, t.reply) for t in make_suite(1, 100))


@pytest.mark.parametrize(
    ("kind", "answer", "reply"),
    [
        ("arithmetic", "42", "40 + 2 = 42."),
        ("arithmetic", "-4", "5 - 9 = -4."),
        ("recall", "red-fox", "The password is red-fox"),
        ("recall", "8:05", "The time of the gate is 8:05."),
        ("chat", "65", "You are 65 years old."),
        ("chat", "You are welcome!", "You are welcome!"),
    ],
)
def test_a_right_reply_scores(kind: Kind, answer: str, reply: str) -> None:
    assert score(task(kind, answer), reply)


@pytest.mark.parametrize(
    ("kind", "answer", "reply"),
    [
        ("arithmetic", "42", "42 + 2 = 44."),
        ("arithmetic", "4", "5 - 9 = -4."),
        ("arithmetic", "4", "I cannot say."),
        ("recall", "red-fox", "The password is red-fox or blue-fox."),
        ("recall", "12", "The room of Ada is 512."),
        ("chat", "Ada", "Your name is Adam."),
        ("chat", "Ada", ""),
    ],
)
def test_a_wrong_reply_does_not_score(kind: Kind, answer: str, reply: str) -> None:
    assert not score(task(kind, answer), reply)
