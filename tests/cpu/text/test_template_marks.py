"""Marks in the families' templates: what the next turn and other conversations share is resumed at its end.

A turn leaves snapshots at its marks, at the end of its prompt and at the end of its answer. Those that lie within what
another prompt shares with it are hit.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest

from strandline.text.conversations import ChatRenderer
from strandline.text.marks import OPENING_TOKENS
from tests.cpu.text.templates import FAMILIES, Family

SYSTEM = {"role": "system", "content": "You answer in few words, and always in the same tone of voice. "}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "Finds a word.", "parameters": {"type": "object"}},
}
QUESTIONS = ("Who are you, and where from?", "And where to?", "Then what will you do there?", "Why is that?")
ANSWERS = ("I am I, from here.", "To the harbour.", "Buy fish, as always.", "For dinner.")


def common(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


class Talk:
    """A conversation, the paths that its turns leave in the cache, and their snapshots."""

    def __init__(self, family: Family, *, with_tools: bool, keeps_thoughts: bool = True) -> None:
        self.family = family
        self.tokenizer = family.tokenizer()
        self.renderer = ChatRenderer(self.tokenizer)
        self.tools = [TOOL] if with_tools and family.has_tools else []
        self.keeps_thoughts = keeps_thoughts
        self.paths: list[tuple[list[int], set[int]]] = []

    def start(self) -> list[dict[str, Any]]:
        return [SYSTEM] if self.family.has_system else []

    def ask(self, messages: list[dict[str, Any]], answer: str) -> tuple[int, int]:
        """Answer a prompt; return its hit tokens, and how many it shares with what is cached."""
        chat = self.renderer.render(messages, tools=self.tools)
        shared = [(common(chat.token_ids, path), snapshots) for path, snapshots in self.paths]
        hits = [max((index for index in snapshots if index <= count), default=0) for count, snapshots in shared]
        written = self.tokenizer.encode(self.family.thought + answer, add_special_tokens=False)
        path = chat.token_ids + written
        self.paths.append((path, {*chat.marks, len(chat.token_ids), len(path)}))
        return max(hits, default=0), max((count for count, _ in shared), default=0)

    def answered(self, answer: str) -> dict[str, Any]:
        thought = self.family.thought if self.keeps_thoughts and "<think>" in self.family.thought else ""
        return {"role": "assistant", "content": thought + answer}


@pytest.mark.parametrize("keeps_thoughts", [True, False])
@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_turn_hits_what_it_shares_with_the_last(name: str, with_tools: bool, keeps_thoughts: bool) -> None:
    talk = Talk(FAMILIES[name], with_tools=with_tools, keeps_thoughts=keeps_thoughts)
    messages = talk.start()
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        messages.append({"role": "user", "content": question})
        hit, shared = talk.ask(messages, answer)
        assert hit >= shared - OPENING_TOKENS
        messages.append(talk.answered(answer))
    assert hit > 0 or name == "tools last"


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_other_conversation_hits_the_shared_beginning_at_first_sight(name: str, with_tools: bool) -> None:
    talk = Talk(FAMILIES[name], with_tools=with_tools)
    talk.ask([*talk.start(), {"role": "user", "content": "Where is the harbour?"}], "There.")
    hit, shared = talk.ask([*talk.start(), {"role": "user", "content": "9 times 9?"}], "81.")
    assert hit >= shared - OPENING_TOKENS


@pytest.mark.parametrize("name", sorted(name for name, family in FAMILIES.items() if family.has_tools))
def test_marks_lie_where_tokens_of_rendered_text_begin(name: str) -> None:
    family = FAMILIES[name]
    chat = ChatRenderer(family.tokenizer()).render(
        [SYSTEM, *({"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate("abc"))],
        tools=[TOOL],
    )
    assert chat.marks
    for mark in chat.marks:
        text = family.tokenizer().decode(chat.token_ids[:mark])
        assert family.tokenizer().encode(text, add_special_tokens=False) == chat.token_ids[:mark]


def test_beginning_of_sequence_appears_once() -> None:
    for family in FAMILIES.values():
        tokenizer = family.tokenizer()
        if "bos_token" in family.template:
            token_ids = ChatRenderer(tokenizer).render([{"role": "user", "content": "x"}]).token_ids
            assert [index for index, token in enumerate(token_ids) if token == tokenizer.bos_token_id] == [0]


def test_default_system_prompt_is_shared_at_first_sight() -> None:
    for name in ("granite 4", "kimi", "olmo"):
        talk = Talk(FAMILIES[name], with_tools=False)
        talk.ask([{"role": "user", "content": "Where is the harbour?"}], "There.")
        hit, shared = talk.ask([{"role": "user", "content": "9 times 9?"}], "81.")
        assert shared > hit >= shared - OPENING_TOKENS - len("assistant")
