"""Sums and word problems; a reply repeats the sum, and shows each step where there are two.

The ``heldout`` split draws operand pairs that the ``train`` split never does.
"""

from __future__ import annotations

from random import Random

from strandline.demo import words
from strandline.demo.dialogue import Dialogue, Split, vary


def ask_sum(d: Dialogue) -> None:
    rng = d.rng
    operator, a, b = _draw_operands(rng, d.split, 999 if d.split == "heldout" or rng.random() < 0.8 else 9999)
    names = {"+": ("+", "plus"), "-": ("-", "minus"), "*": ("*", "times", "x"), "/": ("/", "divided by")}[operator]
    name = rng.choice(names[:2] if rng.random() < 0.9 else names)
    expression = f"{a}{name}{b}" if name in "+-*/" and rng.random() < 0.3 else f"{a} {name} {b}"
    ask = rng.choice(
        (
            "What is {}?",
            "What is {}?",
            "{}",
            "{} = ?",
            "{}?",
            "Calculate {}.",
            "How much is {}?",
            "What's {}?",
            "Compute {}.",
            "Can you tell me {}?",
            "Please work out {}.",
            "{}=",
        )
    )
    if rng.random() < 0.1:
        _ask_long_sum(d)
        return
    result = _apply(operator, a, b)
    d.turn(vary(rng, ask.format(expression)), f"{a} {operator} {b} = {result}.", str(result))


def _ask_long_sum(d: Dialogue) -> None:
    """Ask for three terms; the reply shows both steps."""
    rng = d.rng
    operator, a, b = _draw_operands(rng, d.split, 99, rng.choice("++-"))
    between = _apply(operator, a, b)
    c = rng.randint(1, 99)
    second = "-" if between > c and rng.random() < 0.4 else "+"
    result = _apply(second, between, c)
    forms = ["What is {} {o} {} {p} {}?", "{} {o} {} {p} {}", "{}{o}{}{p}{}", "Calculate {} {o} {} {p} {}."]
    if operator == second == "+":
        forms += ["Add {}, {} and {}.", "What is the sum of {}, {} and {}?"]
    question = rng.choice(forms).format(a, b, c, o=operator, p=second)
    d.turn(vary(rng, question), f"{a} {operator} {b} = {between}. {between} {second} {c} = {result}.", str(result))


def ask_story(d: Dialogue) -> None:
    """Ask a word problem of one or two steps; the reply shows each step."""
    rng = d.rng
    name, other = rng.sample(words.FIRST_NAMES, 2)
    goods = rng.choice(words.GOODS)
    operator, a, b = _draw_operands(rng, d.split, 99, rng.choice("++--*"), is_positive=True)
    first = rng.choice(words.STORIES[operator]).format(name=name, other=other, a=a, b=b, goods=goods)
    is_asked = first.endswith("?")
    story = [first]
    total = _apply(operator, a, b)
    steps = [f"{a} {operator} {b} = {total}."]
    if not is_asked and rng.random() < 0.4:
        c = rng.randint(1, 40)
        is_loss = total > c and rng.random() < 0.5
        story.append(f"Then {name} gives away {c}." if is_loss else f"Then {other} brings {c} more.")
        after = total - c if is_loss else total + c
        steps.append(f"{total} {'-' if is_loss else '+'} {c} = {after}.")
        total = after
    if not is_asked:
        story.append(rng.choice(words.STORY_QUESTIONS).format(goods=goods, name=name))
    steps.append(f"That makes {total} {goods}.")
    d.turn(" ".join(story), " ".join(steps), str(total))


def _draw_operands(
    rng: Random, split: Split, largest: int, operator: str | None = None, *, is_positive: bool = False
) -> tuple[str, int, int]:
    """Draw an operator and its operands; sums and differences beyond 20 are split by a hash, times tables are not."""
    operator = operator or rng.choice("+++---**/")
    if operator in "*/":
        a, b = rng.randint(1 + is_positive, 12), rng.randint(1, 12)
        if split == "train" and operator == "*" and rng.random() < 0.3:
            a, b = rng.sample((rng.randint(10, 99), rng.randint(2, 9)), 2)
        return (operator, a, b) if operator == "*" else (operator, a * b, b)
    while True:
        a, b = (rng.randrange(10 ** rng.randint(1, len(str(largest)))) for _ in range(2))
        if operator == "-" and a < b and (is_positive or rng.random() < 0.9):
            a, b = b, a
        if is_positive and min(a - 1, b, a - b if operator == "-" else 1) < 1:
            continue
        is_small = max(a, b) < 20
        is_heldout = (a * 7919 + b * 104729 + ord(operator)) % 11 == 0
        if (is_heldout and not is_small) == (split == "heldout"):
            return operator, a, b


def _apply(operator: str, a: int, b: int) -> int:
    if operator == "/":
        return a // b
    return {"+": a + b, "-": a - b, "*": a * b}[operator]
