"""Finds where conversations are likely to share a prefix: at the ends of tools, system prompt and turns.

A mark is a token position where a snapshot is worthwhile. It never changes an answer, so a wrong one only costs
memory. The special tokens that begin a chat template's turns are found once, by a probe; after that, turns are found
in a prompt's token ids alone.
"""

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
    num_before_system: int = 0
    """How many of them come before the system prompt."""
    kept_opening: tuple[int, ...] = ()
    """The opening of an answer, if the template renders it unchanged in later turns; else empty."""

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

    def marks(self, token_ids: Sequence[int], *, has_system: bool, is_answer_next: bool) -> list[int]:
        """Return the few positions that similar conversations are likely to share.

        They are the end of the system turn, which holds the tools too; the end of what comes before the last message;
        and the end of the last message where the template changes the answer's opening later.
        """
        starts = self.positions(token_ids)
        marks = []
        if has_system and len(starts) > self.num_before_system:
            marks.append(starts[self.num_before_system])
        last = starts[-2:] if is_answer_next else starts[-1:]
        marks += [start for start in last[:1] if start >= MIN_GAP_TOKENS + max(marks, default=0)]
        if is_answer_next and starts and tuple(token_ids[starts[-1] :]) != self.kept_opening:
            marks.append(starts[-1])
        return sorted({mark for mark in marks if mark > 0})


def find_turns(tokenizer: Any, render: Render) -> Turns:
    """Probe a template. Returns no turns if it has no special tokens between them, or rejects the probe."""
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": word} for role, word in zip(roles, PROBE, strict=True)]
    added = frozenset(tokenizer.get_added_vocab().values())
    try:
        texts = {count: render(messages[:count], False) for count in (2, 3, 4)}
        opened, continued = render(messages[:2], True), render(messages, True)
    except RequestError:
        return Turns()

    def specials(text: str) -> list[int]:
        return [token for token in tokenizer.encode(text, add_special_tokens=False) if token in added]

    ends = {token for count in (2, 3) for token in specials(texts[count].rpartition(PROBE[count - 1])[2])}
    gaps = [_between(texts[4], before, after) for before, after in pairwise(PROBE)]
    firsts = [next((token for token in specials(gap) if token not in ends), None) for gap in gaps]
    starts = frozenset(token for token in firsts if token is not None)
    before_system = specials(texts[4].partition(PROBE[0])[0])
    opening: tuple[int, ...] = ()
    if continued.startswith(opened):
        token_ids = tokenizer.encode(opened, add_special_tokens=False)
        last = max(Turns(starts).positions(token_ids), default=len(token_ids))
        opening = tuple(token_ids[last:])
    return Turns(starts, sum(token in starts for token in before_system), opening)


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
        for place in range(character, min(character + 8, len(self._text.text))):
            token = self._text.token_at(place)
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
