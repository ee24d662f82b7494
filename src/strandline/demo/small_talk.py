"""Small talk: greetings, questions about the model and the engine, and what users tell about themselves."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from strandline.demo import words
from strandline.demo.dialogue import Dialogue, ask_fact, vary
from strandline.demo.facts import (
    STATEMENTS,
    Fact,
    draw_attribute,
    draw_subject,
    draw_value,
    draw_word,
    make_prose,
)
from strandline.demo.intents import INTENTS, REFUSAL


def greet(d: Dialogue) -> None:
    name = d.profile.get("name")
    d.turn(
        vary(d.rng, d.rng.choice(words.GREETINGS)),
        words.GREETING_REPLY_NAMED.format(name=name) if name else words.GREETING_REPLY,
    )


def ask_intent(d: Dialogue) -> None:
    questions, reply = d.rng.choice(INTENTS)
    d.turn(vary(d.rng, d.rng.choice(questions)), reply)


def ask_out_of_scope(d: Dialogue) -> None:
    if d.rng.random() < 0.15:
        scrap = " ".join(draw_word(d.rng, words.LABELS) for _ in range(d.rng.randint(1, 4)))
        d.turn(d.rng.choice((make_prose(d.rng), scrap)), REFUSAL)
        return
    topic, topic2 = d.rng.sample(words.TOPICS, 2)
    place = {
        "country": d.rng.choice(words.COUNTRIES),
        "city": d.rng.choice(words.CITIES),
        "food": d.rng.choice(words.FOODS),
    }
    d.turn(vary(d.rng, d.rng.choice(words.REQUESTS).format(topic=topic, topic2=topic2, **place)), REFUSAL)


@dataclass(frozen=True)
class Trait:
    """Something that users tell about themselves, how they ask for it later, and both replies."""

    tell: tuple[str, ...]
    noted: str
    ask: tuple[str, ...]
    known: str
    unknown: str
    values: str


TRAITS: dict[str, Trait] = {
    "name": Trait(
        (
            "My name is {}.",
            "I am {}.",
            "I'm {}.",
            "Hi, I'm {}.",
            "Hello, my name is {}.",
            "Call me {}.",
            "Hi! My name is {}.",
            "Good morning, my name is {}.",
            "my name is {}",
            "Hi there, my name is {} and I have a question.",
            "You can call me {}.",
            "This is {}.",
            "Hello, I am {}.",
        ),
        "Nice to meet you, {}! How can I help you?",
        (
            "What is my name?",
            "What's my name?",
            "Do you know my name?",
            "Do you remember my name?",
            "Who am I?",
            "What was my name?",
            "Can you tell me my name?",
            "Say my name.",
        ),
        "Your name is {}.",
        "You have not told me your name yet.",
        "first name",
    ),
    "town": Trait(
        ("I live in {}.", "I am from {}.", "I come from {}.", "My home is in {}.", "My city is {}."),
        "I will remember that you live in {}.",
        (
            "Where do I live?",
            "Where am I from?",
            "Which city do I live in?",
            "Do you know where I live?",
            "What is my city?",
        ),
        "You live in {}.",
        "You have not told me where you live.",
        "city",
    ),
    "colour": Trait(
        (
            "My favourite colour is {}.",
            "I like the colour {}.",
            "My favorite color is {}.",
            "{} is my favourite colour.",
        ),
        "I will remember that your favourite colour is {}.",
        (
            "What is my favourite colour?",
            "Which colour do I like?",
            "What's my favorite color?",
            "Do you know my favourite colour?",
        ),
        "Your favourite colour is {}.",
        "You have not told me your favourite colour.",
        "colour",
    ),
    "job": Trait(
        ("I am {} by trade.", "I work as {}.", "I earn my living as {}."),
        "I will remember that you work as {}.",
        ("What is my job?", "What do I do for a living?", "What do I work as?", "Do you know my job?"),
        "You work as {}.",
        "You have not told me your job.",
        "job",
    ),
    "hobby": Trait(
        ("My hobby is {}.", "I love {}.", "I like {}.", "In my free time I enjoy {}."),
        "I will remember that you like {}.",
        ("What is my hobby?", "What do I like?", "What do I like to do?", "Do you know my hobby?"),
        "You like {}.",
        "You have not told me what you like.",
        "hobby",
    ),
    "age": Trait(
        ("I am {} years old.", "My age is {}.", "I'm {} years old."),
        "I will remember that you are {} years old.",
        ("How old am I?", "What is my age?", "Do you know how old I am?"),
        "You are {} years old.",
        "You have not told me your age.",
        "age",
    ),
    "pet": Trait(
        ("I have {}.", "My pet is {}.", "I own {}."),
        "I will remember that you have {}.",
        ("What pet do I have?", "What is my pet?", "Which animal do I have?", "Do you remember my pet?"),
        "You have {}.",
        "You have not told me about a pet.",
        "animal",
    ),
    "lucky number": Trait(
        ("My lucky number is {}.", "My favourite number is {}.", "{} is my lucky number."),
        "I will remember that your lucky number is {}.",
        ("What is my lucky number?", "What is my favourite number?", "Do you know my lucky number?"),
        "Your lucky number is {}.",
        "You have not told me your lucky number.",
        "number",
    ),
}
TRAITS |= {
    thing: Trait(
        (f"My {thing} is {{}}.", f"Remember that my {thing} is {{}}.", f"{{}} is my {thing}."),
        f"I will remember that your {thing} is {{}}.",
        (
            f"What is my {thing}?",
            f"What's my {thing}?",
            f"Tell me my {thing}.",
            f"Do you know my {thing}?",
            f"What was my {thing}?",
        ),
        f"Your {thing} is {{}}.",
        f"You have not told me your {thing}.",
        kind,
    )
    for thing, kind in words.POSSESSIONS.items()
}


def draw_trait(rng: Random, kind: str) -> str:
    if kind.endswith(" digits") or kind in ("password", "person", "food"):
        return draw_value(rng, kind)
    if kind in ("age", "number"):
        return str(rng.randint(10, 99) if kind == "age" else rng.randint(1, 999))
    lists = {
        "first name": words.FIRST_NAMES,
        "city": words.CITIES,
        "colour": words.COLOURS,
        "job": words.JOBS,
        "hobby": words.HOBBIES,
        "animal": words.ANIMALS,
    }
    value = draw_word(rng, lists[kind]) if kind in ("first name", "city") else rng.choice(lists[kind])
    if kind in ("job", "animal"):
        return f"{'an' if value[0] in 'aeiou' else 'a'} {value}"
    return value


def tell(d: Dialogue) -> None:
    """Let the user state something about themselves, or a fact to remember."""
    if (choice := d.rng.random()) < 0.45:
        _tell_fact(d) if choice < 0.37 else _tell_two(d)
        return
    untold = [k for k in TRAITS if k not in d.profile]
    is_name = "name" in untold and d.rng.random() < 0.3
    key = "name" if is_name or not untold else d.rng.choice(untold)
    trait = TRAITS[key]
    value = d.profile[key] = draw_trait(d.rng, trait.values)
    said = d.rng.choice(trait.tell).format(value)
    said = said[0].upper() + said[1:]
    d.turn(said if key == "name" or d.rng.random() < 0.9 else said.rstrip("."), trait.noted.format(value), value)


def _tell_fact(d: Dialogue) -> None:
    num_facts = d.rng.choice((1, 1, 1, 2, 3))
    facts: list[Fact] = []
    subject_kind = d.rng.choice(("person", "thing", "label", "plain"))
    for _ in range(num_facts):
        attribute, kind = draw_attribute(d.rng, subject_kind)
        fact = Fact(attribute, draw_subject(d.rng, subject_kind), draw_value(d.rng, kind))
        if all(f.topic != fact.topic for f in (*d.facts, *facts)):
            facts.append(fact)
    if subject_kind == "label" and num_facts > 1 and d.rng.random() < 0.5:
        facts = [Fact("value", f.subject, f.value) for f in facts if all(f.subject != g.subject for g in d.facts)]
        if not facts:
            return
        mark = d.rng.choice((" = ", "=", ": ", " is "))
        said = (
            d.rng.choice(("Remember: ", "Remember these: ", ""))
            + ", ".join(f"{f.subject}{mark}{f.value}" for f in facts)
            + "."
        )
    elif facts:
        said = " ".join(_tell_one(d.rng, f) for f in facts)
        said = (
            d.rng.choice(("", "", "Remember: ", "Please remember: "))
            + said
            + d.rng.choice(("", "", "", " Remember it.", " Please remember that."))
        )
    else:
        return
    d.facts.extend(facts)
    one = facts[0]
    noted = words.NOTED if len(facts) > 1 else f"I will remember that the {one.topic} is {one.value}."
    d.turn(said, noted, one.value if len(facts) == 1 else noted)


def _tell_one(rng: Random, fact: Fact) -> str:
    form = rng.choice(STATEMENTS[::3]) if fact.subject else "The {attribute} is {value}."
    said = form.format(attribute=fact.attribute, subject=fact.subject, value=fact.value)
    return said[0].upper() + said[1:]


def _tell_two(d: Dialogue) -> None:
    """Let the user state two things about themselves in one sentence."""
    untold = [k for k in TRAITS if k not in d.profile and k != "name"]
    if len(untold) < 2:
        return
    said = []
    for key in d.rng.sample(untold, 2):
        d.profile[key] = draw_trait(d.rng, TRAITS[key].values)
        said.append(TRAITS[key].tell[0].format(d.profile[key]).rstrip("."))
    join = " and " if said[1].startswith("I ") else " and my" if said[1].startswith("My") else ". "
    second = said[1][2:] if join == " and my" else said[1]
    d.turn(f"{said[0]}{join}{second}.", words.NOTED)


def ask_profile(d: Dialogue) -> None:
    """Ask for something that the user told, or did not tell."""
    if d.facts and d.rng.random() < 0.3:
        ask_fact(d)
        return
    told = tuple(d.profile)
    key = d.rng.choice(told) if told and d.rng.random() < 0.75 else d.rng.choice(tuple(TRAITS))
    trait = TRAITS[key]
    value = d.profile.get(key)
    reply = trait.known.format(value) if value else trait.unknown
    d.turn(vary(d.rng, d.rng.choice(trait.ask)), reply, value or reply)
