"""The generators draw the same from the same seed, answer their own questions rightly, and keep to their bounds."""

import re
from random import Random

import pytest

from strandline.demo.facts import estimate_tokens, make_document
from strandline.demo.sums import _draw_operands
from strandline.demo.tasks import KINDS, Task, make_task

SEEDS = range(60)


def draw(kind: str, seed: int, num_tokens: int = 300) -> Task:
    return make_task(kind, Random(seed), num_tokens=num_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_fixes_the_task(kind: str) -> None:
    assert [draw(kind, seed) for seed in SEEDS] == [draw(kind, seed) for seed in SEEDS]
    assert draw(kind, 1) != draw(kind, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_ends_with_the_user_and_roles_alternate(kind: str) -> None:
    for seed in SEEDS:
        roles = [m["role"] for m in draw(kind, seed).messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]


def test_recall_answer_is_stated_beside_its_topic() -> None:
    for seed in range(200):
        task = draw("recall", seed)
        found = re.fullmatch(r"The (.+) is (.+)\.", task.reply)
        assert found
        assert found[2] == task.answer
        text = "\n".join(m["content"] for m in task.messages)
        topic, subject = found[1].lower(), found[1].split(" of ")[-1].lower()
        lines = [line for line in text.splitlines() if task.answer in line]
        assert any(topic in line.lower() or subject in line.lower() for line in lines)


def test_no_two_facts_of_a_document_share_attribute_and_subject() -> None:
    for seed in SEEDS:
        _, facts = make_document(Random(seed), 800)
        assert facts
        assert len({(f.attribute, f.subject) for f in facts}) == len(facts)


@pytest.mark.parametrize("num_tokens", [100, 500, 4096])
def test_a_document_keeps_within_its_tokens(num_tokens: int) -> None:
    for seed in range(20):
        text, _ = make_document(Random(seed), num_tokens)
        assert estimate_tokens(text) <= num_tokens + 8


def test_every_equation_in_a_reply_holds() -> None:
    equation = re.compile(r"(-?\d+) ([-+*/]) (\d+) = (-?\d+)\.")
    for seed in range(500):
        task = draw("arithmetic", seed)
        equations = equation.findall(task.reply)
        assert equations, task
        for a, operator, b, result in equations:
            right = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
            assert int(result) * int(b) == int(a) if operator == "/" else int(result) == right[operator]
        assert equations[-1][-1] == task.answer
        asked = set(re.findall(r"\d+", task.messages[-1]["content"]))
        assert {equations[0][0], equations[0][2]} <= asked


def test_held_out_sums_never_occur_in_training() -> None:
    train = {_draw_operands(Random(seed), "train", 99) for seed in range(20000)}
    heldout = {_draw_operands(Random(seed), "heldout", 99) for seed in range(20000)}
    assert {t for t in train & heldout if t[0] in "+-"} == set()
    assert len(heldout) > 100


def test_a_told_name_is_asked_for_and_known() -> None:
    asked = [draw("chat", seed) for seed in range(3000)]
    known = [t for t in asked if t.reply.startswith("Your name is ")]
    assert known
    for task in known:
        said = " ".join(m["content"] for m in task.messages if m["role"] != "assistant")
        assert re.search(rf"\b{task.answer}\b", said)
