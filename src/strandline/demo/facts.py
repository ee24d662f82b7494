"""Facts drawn at random, the documents that state them, and the questions that ask for them.

Every draw comes from the ``random.Random`` that is passed in, so a seed fixes every character. A fact is stated once
in its document, and no two facts of a document share their attribute and subject.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random

from strandline.demo import words
from strandline.demo.intents import INTENTS

Counter = Callable[[str], int]
Prose = Callable[[Random], str]
_PIECE = re.compile(r" ?[^\W\d_]+|\d| ?[^\w\s]+|_|\s+")


@dataclass(frozen=True)
class Fact:
    attribute: str
    subject: str
    value: str

    @property
    def topic(self) -> str:
        """What the value is the value of, such as ``code of the old vault``."""
        return f"{self.attribute} of {self.subject}" if self.subject else self.attribute

    def stated(self) -> str:
        return f"The {self.topic} is {self.value}."


def estimate_tokens(text: str) -> int:
    """Estimate the demo tokenizer's count, to about a tenth and without the tokenizer."""
    return sum(map(_estimate_piece, _PIECE.findall(text)))


@lru_cache(maxsize=65536)
def _estimate_piece(piece: str) -> int:
    word = piece.strip()
    if len(word) < 4 or word.lower() in _frequent_words():
        return 1
    return max(1, round(len(word) / 2.7))


@cache
def _frequent_words() -> frozenset[str]:
    lists = (
        words.FIRST_NAMES,
        words.LAST_NAMES,
        words.CITIES,
        words.COLOURS,
        words.ADJECTIVES,
        words.THINGS,
        words.LABELS,
        words.GOODS,
    )
    spoken = [reply for _, reply in INTENTS] + [
        *words.FILLER,
        *words.REQUESTS,
        *words.JOBS,
        *words.VERBS,
        *words.PLACES,
        *QUESTIONS,
        *QUESTIONS_ON_SUBJECT,
    ]
    attributes = [name for kind in ATTRIBUTES.values() for name in kind] + list(words.POSSESSIONS)
    return frozenset(
        w.lower()
        for text in (*spoken, *attributes, *(x for names in lists for x in names))
        for w in re.findall(r"[^\W\d_]+", text)
    )


def make_document(
    rng: Random, num_tokens: int, *, count: Counter = estimate_tokens, prose: Prose | None = None
) -> tuple[str, list[Fact]]:
    """Write a document of at most ``num_tokens`` tokens (but one fact at least) that states each of its facts once."""
    sections: list[str] = []
    facts: list[Fact] = []
    taken: set[tuple[str, str]] = set()
    num_sections = rng.choice((1, 1, 2, 3)) if num_tokens > 200 else 1
    left = num_tokens
    for index in range(num_sections):
        lines = _write_section(rng, left // (num_sections - index), taken, facts, count, prose)
        sections.append("\n".join(lines))
        left = num_tokens - sum(count(s) + 1 for s in sections)
    return "\n\n".join(sections), facts


def _write_section(
    rng: Random, num_tokens: int, taken: set[tuple[str, str]], facts: list[Fact], count: Counter, prose: Prose | None
) -> list[str]:
    style = rng.choice(("list", "list", "sentences", "notes", "notes", "records"))
    subject_kind = rng.choice(("person", "thing", "label", "plain"))
    if subject_kind == "plain":
        style = rng.choice(("list", "notes"))
    attributes = dict(
        draw_attribute(rng, subject_kind) for _ in range(1 if style == "list" else rng.choice((1, 1, 2, 3)))
    )
    is_table = style == "list" and subject_kind != "plain"
    head = next(iter(attributes))
    lines = (
        [rng.choice((f"List of every {head}:", f"# The {head} of each", f"{head.capitalize()}:"))] if is_table else []
    )
    form = rng.choice(_LINES)
    statement = rng.choice((0, 1, 2, 3, None))
    share = rng.choice((0.15, 0.3, 0.6))
    used = sum(count(line) + 1 for line in lines)
    is_first = True
    for _ in range(10_000):
        if not is_first and style == "notes" and rng.random() > share:
            line, new = (prose or make_prose)(rng), []
        else:
            subject = draw_subject(rng, subject_kind)
            if subject_kind == "plain":
                attributes = dict((draw_attribute(rng, subject_kind),))
            if any((subject, a) in taken for a in attributes):
                continue
            new = [Fact(a, subject, draw_value(rng, kind)) for a, kind in attributes.items()]
            line = _write_line(rng, style, form, statement, new)
        used += count(line) + 1
        if used > num_tokens and not is_first:
            break
        lines.append(line)
        facts.extend(new)
        taken.update((f.subject, f.attribute) for f in new)
        is_first = False
    return lines


def _write_line(rng: Random, style: str, form: str, statement: int | None, facts: Sequence[Fact]) -> str:
    subject = facts[0].subject
    if not subject:
        fact = facts[0]
        name = fact.attribute.capitalize() if rng.random() < 0.3 else fact.attribute
        return (
            form.format(subject=name, value=fact.value)
            if style == "list"
            else f"{rng.choice(('', '', 'Note: '))}{fact.stated()}"
        )
    if style == "list":
        return form.format(subject=subject, value=facts[0].value)
    if style == "records":
        return f"{subject}: " + ", ".join(f"{f.attribute} {f.value}" for f in facts)
    said = (STATEMENTS[rng.randrange(4) if statement is None else statement].format(**vars(f)) for f in facts)
    return " ".join(text[0].upper() + text[1:] for text in said)


def make_prose(rng: Random) -> str:
    """Write a sentence that states no fact anyone asks for."""
    if rng.random() < 0.3:
        return rng.choice(words.FILLER)
    return (
        f"The {rng.choice(words.JOBS)} {rng.choice(words.VERBS)} the {rng.choice(words.ADJECTIVES)} "
        f"{rng.choice(words.THINGS)} {rng.choice(words.PLACES)}."
    )


ATTRIBUTES: dict[str, dict[str, str]] = {
    "person": {
        "badge number": "5 digits",
        "room": "3 digits",
        "phone extension": "4 digits",
        "favourite colour": "colour",
        "home town": "city",
        "password": "password",
        "pet": "animal",
        "job": "job",
        "manager": "person",
        "age": "2 digits",
        "favourite food": "food",
        "hobby": "hobby",
        "team": "colour",
        "salary": "4 digits",
        "desk": "2 digits",
        "partner": "person",
    },
    "thing": {
        "code": "4 digits",
        "password": "password",
        "keeper": "person",
        "colour": "colour",
        "price": "3 digits",
        "location": "city",
        "state": "state",
        "serial number": "6 digits",
        "height": "2 digits",
        "weight": "3 digits",
        "owner": "person",
        "temperature": "2 digits",
        "capacity": "3 digits",
        "key": "4 digits",
        "manufacturer": "city",
    },
    "label": {
        "value": "3 digits",
        "code": "4 digits",
        "password": "password",
        "owner": "person",
        "colour": "colour",
        "number": "2 digits",
        "port": "5 digits",
        "size": "2 digits",
        "state": "state",
        "mascot": "animal",
    },
}
_LINES = (
    "{subject}: {value}",
    "- {subject}: {value}",
    "{subject} = {value}",
    "{subject} -> {value}",
    "* {subject} - {value}",
    '"{subject}": "{value}",',
    "{subject} | {value}",
)
STATEMENTS = (
    "The {attribute} of {subject} is {value}.",
    "{subject} has the {attribute} {value}.",
    "Note: {attribute} of {subject} is {value}.",
    "{subject}'s {attribute} is {value}.",
)
_VALUE_KINDS = (
    "1 digits",
    "2 digits",
    "3 digits",
    "4 digits",
    "5 digits",
    "6 digits",
    "password",
    "person",
    "city",
    "colour",
    "word",
    "word",
    "time",
    "phrase",
)
_HEADS = (
    ("code", "4 digits"),
    ("password", "word"),
    ("number", "3 digits"),
    ("name", "person"),
    ("time", "time"),
    ("price", "2 digits"),
    ("code word", "word"),
)


def draw_word(rng: Random, known: Sequence[str]) -> str:
    """Draw from a list, from common words, or make one up, with the list's capitals."""
    if rng.random() < 0.75:
        return rng.choice(known)
    word = rng.choice(words.COMMON) if rng.random() < 0.3 else _make_up_word(rng)
    return word.capitalize() if known[0][0].isupper() else word


def _make_up_word(rng: Random) -> str:
    syllables = (
        rng.choice(words.ONSETS) + rng.choice(words.VOWELS) + rng.choice(words.CODAS) for _ in range(rng.randint(1, 3))
    )
    return "".join(syllables)


def draw_subject(rng: Random, kind: str) -> str:
    if kind == "plain":
        return ""
    if kind == "person":
        first = draw_word(rng, words.FIRST_NAMES)
        return first if rng.random() < 0.2 else f"{first} {draw_word(rng, words.LAST_NAMES)}"
    if kind == "thing":
        adjective = rng.choice(words.ADJECTIVES if rng.random() < 0.6 else words.COLOURS)
        thing = draw_word(rng, words.THINGS)
        return f"the {thing}" if rng.random() < 0.15 else f"the {adjective} {thing}"
    first, second = (draw_word(rng, words.LABELS) for _ in range(2))
    return first if rng.random() < 0.3 else f"{first} {second}"


def draw_attribute(rng: Random, subject_kind: str) -> tuple[str, str]:
    """Draw the name of an attribute and the kind of its values: a usual one, or any word or two."""
    if subject_kind != "plain" and rng.random() < 0.7:
        return rng.choice(tuple(ATTRIBUTES[subject_kind].items()))
    if subject_kind == "plain" and rng.random() < 0.3:
        return rng.choice(tuple(words.POSSESSIONS.items()))
    head, kind = rng.choice(_HEADS) if rng.random() < 0.5 else (draw_word(rng, words.COMMON), rng.choice(_VALUE_KINDS))
    return (head if rng.random() < 0.3 else f"{draw_word(rng, words.COMMON)} {head}"), kind


def draw_value(rng: Random, kind: str) -> str:
    if kind == "time":
        return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"
    if kind == "word":
        return draw_word(rng, words.COMMON)
    if kind == "phrase":
        return f"{draw_word(rng, words.ADJECTIVES)} {draw_word(rng, words.COMMON)}"
    if kind == "first name":
        return draw_word(rng, words.FIRST_NAMES)
    if kind.endswith(" digits"):
        width = int(kind[0])
        return str(rng.randrange(10 ** (width - 1), 10**width))
    if kind == "password":
        return f"{rng.choice(words.COLOURS)}-{draw_word(rng, words.ANIMALS)}"
    if kind == "person":
        return draw_subject(rng, kind)
    lists = {
        "colour": words.COLOURS,
        "city": words.CITIES,
        "animal": words.ANIMALS,
        "job": words.JOBS,
        "state": words.STATES,
        "food": words.FOODS,
        "hobby": words.HOBBIES,
    }
    return draw_word(rng, lists[kind]) if kind == "city" else rng.choice(lists[kind])


QUESTIONS = (
    "What is the {topic}?",
    "What is the {topic}?",
    "Tell me the {topic}.",
    "Please look up the {topic}.",
    "Do you know the {topic}?",
    "I need the {topic}.",
    "What's the {topic}?",
    "Give me the {topic}.",
    "What was the {topic}?",
    "Can you tell me the {topic}?",
    "The {topic}?",
)
QUESTIONS_ON_SUBJECT = (
    "Which {attribute} does {subject} have?",
    "{subject}: what is the {attribute}?",
    "What {attribute} is given for {subject}?",
    "What is {subject}'s {attribute}?",
    "{subject}'s {attribute}?",
    "{subject} {attribute}",
)


def make_question(rng: Random, fact: Fact) -> str:
    forms = QUESTIONS_ON_SUBJECT if fact.subject and rng.random() < 0.35 else QUESTIONS
    if fact.attribute == "value" and rng.random() < 0.3:
        return f"What is {fact.subject}?"
    if fact.attribute in ("manager", "keeper", "owner", "partner") and rng.random() < 0.3:
        return f"Who is the {fact.topic}?"
    question = rng.choice(forms).format(attribute=fact.attribute, subject=fact.subject, topic=fact.topic)
    return question[0].upper() + question[1:]
