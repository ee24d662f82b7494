"""Training conversations of the demo model: several answered questions, with or without a document.

A seed fixes every character. The tasks that the trained model is scored on are those of ``strandline.demo.tasks``.
"""

from __future__ import annotations

from random import Random

from strandline.demo import words
from strandline.demo.dialogue import Dialogue, Message, Turn, ask_fact, vary
from strandline.demo.facts import (
    QUESTIONS,
    Counter,
    Fact,
    Prose,
    draw_attribute,
    draw_subject,
    draw_word,
    estimate_tokens,
    make_prose,
)
from strandline.demo.small_talk import ask_intent, ask_out_of_scope, ask_profile, greet, tell
from strandline.demo.sums import ask_story, ask_sum
from strandline.demo.tasks import open_document, open_plain


def make_conversation(
    rng: Random, num_tokens: int, *, count: Counter = estimate_tokens, prose: Prose | None = None
) -> list[Message]:
    """Draw a training conversation of about ``num_tokens`` tokens with as many answered questions as fit."""
    dialogue = Dialogue(rng, "train", count)
    if rng.random() < min(0.9, 0.42 + num_tokens / 6000):
        length = rng.uniform(0.35, 0.85) if num_tokens < 2048 else rng.uniform(0.6, 0.92)
        open_document(dialogue, int(num_tokens * length), prose)
        turns: tuple[tuple[Turn, int], ...] = _DOCUMENT_TURNS
    else:
        open_plain(dialogue)
        turns = _CHAT_TURNS
    kinds, weights = zip(*turns, strict=True)
    while dialogue.num_tokens < num_tokens - 24:
        rng.choices(kinds, weights)[0](dialogue)
    return dialogue.messages


def ask_echo(d: Dialogue) -> None:
    text = d.rng.choice(
        (make_prose(d.rng), " ".join(d.rng.sample(words.LABELS, d.rng.randint(1, 5))), draw_word(d.rng, words.CITIES))
    )
    d.turn(d.rng.choice(("Repeat: {}", "Say: {}", "Repeat after me: {}", "Please repeat this: {}")).format(text), text)


def ask_unknown(d: Dialogue) -> None:
    """Ask for a fact that was not given."""
    kind = d.rng.choice(("person", "thing", "label", "plain"))
    missing = Fact(draw_attribute(d.rng, kind)[0], draw_subject(d.rng, kind), "")
    if any(f.topic == missing.topic or (f.subject and f.subject == missing.subject) for f in d.facts):
        return
    d.turn(vary(d.rng, d.rng.choice(QUESTIONS).format(topic=missing.topic)), f"I do not know the {missing.topic}.")


_DOCUMENT_TURNS: tuple[tuple[Turn, int], ...] = (
    (ask_fact, 24),
    (ask_unknown, 1),
    (ask_sum, 1),
    (ask_intent, 1),
    (ask_out_of_scope, 1),
    (tell, 1),
    (ask_profile, 1),
)
_CHAT_TURNS: tuple[tuple[Turn, int], ...] = (
    (greet, 2),
    (ask_intent, 6),
    (tell, 5),
    (ask_profile, 6),
    (ask_sum, 7),
    (ask_story, 5),
    (ask_out_of_scope, 3),
    (ask_echo, 1),
    (ask_unknown, 1),
)
