"""Positions where conversations are likely to share a prefix: the ends of tools, system prompt and turns.

A mark is a token position where a snapshot is worthwhile. It never changes an answer, so a wrong mark only costs
memory. The positions where other conversations, and the next turn of this one, diverge from a prompt are found by
rendering them: templates merge system prompts into the first turn, move tools, and drop earlier reasoning. The special
tokens that begin a template's turns are found once, by a probe; a mark in the opening of a turn moves to its start.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from strandline.errors import RequestError
from strandline.text.control_tokens import SplitText

MIN_GAP_TOKENS: Final = 16
"""Minimum distance between the template's marks: fewer tokens are cheaper to recompute than to cache."""
REACH_TOKENS: Final = 64
"""Tokens before a marked character that are tokenized again, to find where they agree with the prompt's."""
OPENING_TOKENS: Final = 16
"""Longest opening of a turn, such as a special token, a role and a line break."""

PROBE: Final = ("kestrel", "walnut", "harbour", "lantern")
"""Contents of the probe's messages (system, user, assistant, user): words that no template contains."""

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, bool], str]
"""Renders messages as text, with the answer's opening if the flag is set."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The token ids that separate a template's turns."""

    starts: frozenset[int] = frozenset()
    """Special tokens that begin a turn."""

    def positions(self, token_ids: Sequence[int]) -> list[int]:
        """Return where turns begin."""
        found = []
        for start in self.starts:
            position = -1
            try:
                while True:
                    position = token_ids.index(start, position + 1)
                    found.append(position)
            except ValueError:
                continue
        return sorted(found)


def start_before(position: int, starts: Sequence[int]) -> int:
    """Return the start of the turn whose opening a position lies in; the position itself if it lies in none."""
    start = max((start for start in starts if start <= position), default=0)
    return start if position - start <= OPENING_TOKENS else position


def find_turns(tokenizer: Any, render: Render) -> Turns:
    """Probe a template. Returns no turns if it has no special tokens between them, or rejects the probe."""
    # Some templates accept no system prompt.
    for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
        with contextlib.suppress(RequestError):
            return _probe(tokenizer, render, roles)
    return Turns()


def _probe(tokenizer: Any, render: Render, roles: Sequence[str]) -> Turns:
    messages = [{"role": role, "content": word} for role, word in zip(roles, PROBE, strict=False)]
    added = frozenset(tokenizer.get_added_vocab().values())

    def specials(text: str) -> list[int]:
        return [token for token in tokenizer.encode(text, add_special_tokens=False) if token in added]

    texts = {count: render(messages[:count], False) for count in range(len(roles) - 2, len(roles) + 1)}
    whole = texts.pop(len(roles))
    ends = {token for count, text in texts.items() for token in specials(text.rpartition(PROBE[count - 1])[2])}
    gaps = [_between(whole, before, after) for before, after in pairwise(PROBE[: len(roles)])]
    firsts = [next((token for token in specials(gap) if token not in ends), None) for gap in gaps]
    return Turns(frozenset(token for token in firsts if token is not None))


def _between(text: str, before: str, after: str) -> str:
    return text.partition(before)[2].partition(after)[0]


class Characters:
    """Maps characters of a tokenized text to token positions."""

    def __init__(self, text: SplitText) -> None:
        self._text = text

    def position(self, character: int) -> int:
        """Return how many tokens the text up to a character has in common with the whole text.

        The text after a character may change the tokens right before it, so these are tokenized again.
        """
        if not self._text.knows_characters:
            return self._agreement(0, character)
        token = None
        for index in range(character, min(character + 8, len(self._text.text))):
            token = self._text.token_at(index)
            if token is not None:
                break
        anchor = max((len(self._text.token_ids) if token is None else token) - REACH_TOKENS, 0)
        return self._agreement(anchor, character) or self._agreement(0, character)

    def _agreement(self, anchor: int, character: int) -> int:
        """Return the position up to which the tokens from ``anchor`` on agree; 0 if none do."""
        token_ids = self._text.encode(self._text.start_of(anchor) if anchor else 0, character)
        count = 0
        for ours, theirs in zip(token_ids, self._text.token_ids[anchor : anchor + len(token_ids)], strict=False):
            if ours != theirs:
                break
            count += 1
        return anchor + count if count else 0


def common_length(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first.startswith(second[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def next_start(position: int, starts: Iterable[int]) -> int | None:
    """Return the turn that begins at a position or next after it."""
    return min((start for start in starts if start >= position), default=None)
