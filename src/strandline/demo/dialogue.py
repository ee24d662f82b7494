"""A conversation under construction, and the turns that are about facts: one right reply to each question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from strandline.demo import words
from strandline.demo.facts import (
    Counter,
    Fact,
    estimate_tokens,
    make_question,
)

Split = Literal["train", "heldout"]
Message = dict[str, str]
TURN_TOKENS = 5


@dataclass
class Dialogue:
    """A conversation under construction and what is known in it."""

    rng: Random
    split: Split = "train"
    count: Counter = estimate_tokens
    messages: list[Message] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    profile: dict[str, str] = field(default_factory=dict)
    num_tokens: int = 3
    answer: str = ""

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})
        self.num_tokens += self.count(content) + TURN_TOKENS

    def turn(self, question: str, reply: str, answer: str | None = None) -> None:
        self.say("user", question)
        self.say("assistant", reply)
        self.answer = reply if answer is None else answer


Turn = Callable[[Dialogue], None]


def vary(rng: Random, text: str) -> str:
    """Write a question as carelessly as people do."""
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.12:
        text = text.rstrip("?.!")
    if rng.random() < 0.08:
        text = rng.choice(words.OPENERS) + text
    if rng.random() < 0.05:
        text = text + rng.choice(words.CLOSERS)
    return text


def ask_fact(d: Dialogue) -> None:
    fact = d.rng.choice(d.facts)
    d.turn(vary(d.rng, make_question(d.rng, fact)), fact.stated(), fact.value)
