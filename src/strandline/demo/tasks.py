"""Tasks with known answers: recall from long documents, small sums, and short conversations.

Every draw comes from the ``random.Random`` that is passed in, so a seed fixes every character. A conversation has
exactly one right reply at each turn. The demo model learned on the ``train`` split; ``heldout`` draws operand pairs
that never occur there. Recall needs no split: its keys and values are drawn afresh for each document.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from strandline.demo import words
from strandline.demo.dialogue import Dialogue, Message, Split, ask_fact
from strandline.demo.facts import Counter, Prose, draw_word, estimate_tokens, make_document
from strandline.demo.small_talk import ask_intent, ask_out_of_scope, ask_profile, greet, tell
from strandline.demo.sums import ask_story, ask_sum

Kind = Literal["recall", "arithmetic", "chat"]
KINDS: tuple[Kind, ...] = ("recall", "arithmetic", "chat")
MIN_RECALL_TOKENS = 100
MAX_RECALL_TOKENS = 4096


@dataclass(frozen=True)
class Task:
    """A conversation that ends with the user's turn, the short right answer, and a full reply that gives it."""

    kind: Kind
    messages: tuple[Message, ...]
    answer: str
    reply: str


def make_task(
    kind: Kind, rng: Random, *, split: Split = "heldout", num_tokens: int = 512, count: Counter = estimate_tokens
) -> Task:
    """Draw one task; ``num_tokens`` bounds the prompt of a ``recall`` task and is nearly reached."""
    dialogue = Dialogue(rng, split, count)
    {"recall": _recall_task, "arithmetic": _arithmetic_task, "chat": _chat_task}[kind](dialogue, num_tokens)
    reply = dialogue.messages.pop()["content"]
    return Task(kind, tuple(dialogue.messages), dialogue.answer, reply)


def _recall_task(d: Dialogue, num_tokens: int) -> None:
    question_room = 48
    open_document(d, num_tokens - d.num_tokens - question_room, None)
    is_asked = d.answer not in ("", words.DOCUMENT_READ)
    if not is_asked or d.rng.random() < 0.3:
        ask_fact(d)


def _arithmetic_task(d: Dialogue, num_tokens: int) -> None:
    open_plain(d)
    d.rng.choice((ask_sum, ask_story))(d)


def _chat_task(d: Dialogue, num_tokens: int) -> None:
    open_plain(d)
    for _ in range(d.rng.randint(0, 4)):
        d.rng.choice((tell, tell, greet, ask_intent, ask_sum))(d)
    d.rng.choice((greet, ask_intent, ask_intent, ask_profile, ask_profile, ask_out_of_scope))(d)


def open_plain(d: Dialogue) -> None:
    """Begin a conversation without a document: with a system prompt, or with nothing."""
    if d.rng.random() < 0.1:
        name = d.profile["name"] = draw_word(d.rng, words.FIRST_NAMES)
        d.say("system", d.rng.choice(words.SYSTEM_PROMPTS_NAMED).format(name))
    elif d.rng.random() < 0.5:
        d.say("system", d.rng.choice(words.SYSTEM_PROMPTS))


def open_document(d: Dialogue, num_tokens: int, prose: Prose | None) -> None:
    """Put a document in the system prompt, in a first turn of its own, or before the first question."""
    lead = d.rng.choice(words.DOCUMENT_LEADS)
    text, d.facts = make_document(d.rng, num_tokens - d.count(lead) - 8, count=d.count, prose=prose)
    place = d.rng.choice(("system", "system", "turn", "question"))
    if place == "system":
        d.say("system", f"{lead}\n\n{text}")
        return
    if d.rng.random() < 0.5:
        d.say("system", d.rng.choice(words.SYSTEM_PROMPTS))
    if place == "turn":
        d.turn(f"{lead}\n\n{text}", words.DOCUMENT_READ)
        return
    ask_fact(d)
    question = d.messages[-2]
    question["content"] = f"{lead}\n\n{text}\n\n{question['content']}"
    d.num_tokens += d.count(text) + d.count(lead)
