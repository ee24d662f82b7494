"""Budgets of reasoning: how much of it a prompt ends with, and the matcher that enforces a budget.

The matcher constrains an output as a grammar does: while reasoning is open and has used its budget, it allows only the
tokens of the text that ends it, one after the other. Until then it allows every token, and the engine need not ask it.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from strandline.reasoning_config import CLOSE, OPEN
from strandline.records.constraints import UNCONSTRAINED, TokenMatcher
from strandline.records.reasoning_rules import ReasoningRules, ThinkingBudget
from strandline.text.reasoning import ThinkParser
from strandline.text.segments import SegmentKind
from strandline.text.token_stream import TokenStream

MAX_SEARCHED_TOKENS: Final = 64 * 1024
"""The most tokens of a prompt that are decoded to find where its open reasoning begins."""
OPENING: Final = re.compile(rf"(?m)^[ \t]*{OPEN}")


def num_open_tokens(prompt_ids: Sequence[int], tokenizer: Any) -> int | None:
    """Return how many tokens of reasoning a prompt ends with; None: it has none, or its last one is closed."""
    added = tokenizer.get_added_vocab()
    if OPEN in added and CLOSE in added:
        tags = added[OPEN], added[CLOSE]
        num_after = next((count for count, token in enumerate(reversed(prompt_ids)) if token in tags), None)
        return num_after if num_after is not None and prompt_ids[-1 - num_after] == tags[0] else None
    last, text = _last_tokens(prompt_ids, tokenizer)
    opened, closed = text.rfind(OPEN), text.rfind(CLOSE)
    if opened <= closed:
        return None
    num_characters = len(text) - opened - len(OPEN)
    counts = range(len(last) + 1)
    return bisect_right(counts, num_characters, key=lambda n: len(tokenizer.decode(last[len(last) - n :]))) - 1


def _last_tokens(prompt_ids: Sequence[int], tokenizer: Any) -> tuple[list[int], str]:
    """Return the last tokens of a prompt, with a tag of reasoning among them if there is one, and their text."""
    size = 64
    while True:
        last = list(prompt_ids[-size:])
        text = str(tokenizer.decode(last))
        if OPEN in text or CLOSE in text or size >= min(len(prompt_ids), MAX_SEARCHED_TOKENS):
            return last, text
        size *= 4


class ReasoningWatch:
    """Follows an output token by token and knows whether its reasoning is open.

    After a section of reasoning another one may be opened, but not after a call has been: by the tag as a special token
    or, if it is none, at the beginning of a line.
    """

    def __init__(self, tokenizer: Any, rules: ReasoningRules, hidden_ids: frozenset[int] | None = None) -> None:
        self.num_sections = int(rules.is_open)
        """Sections of reasoning that have been opened."""
        self.may_open = True
        """Whether a section may be opened later."""
        self._rules = rules
        self._hidden_ids = hidden_ids or frozenset()
        self._stream = TokenStream(tokenizer.backend_tokenizer, skip_special_tokens=False)
        self._opening_id: int | None = tokenizer.get_added_vocab().get(OPEN)
        self._parser = ThinkParser.of(rules)
        self._line = ""
        """The current line of the content, as far as it may open a section."""
        self._end = ""
        """The last characters of the content, which may be the beginning of a call's tag."""

    @property
    def is_open(self) -> bool:
        return self._parser.is_inside

    @property
    def is_undecided(self) -> bool:
        """Whether the output so far may be the beginning of the opening tag."""
        return self._parser.may_open

    @property
    def is_ended_by_call(self) -> bool:
        """Whether the last section has been ended by a call."""
        return self._parser.is_ended_by_call

    def append(self, token: int) -> None:
        """Append a token."""
        piece = None if token in self._hidden_ids else self._stream.step(token)
        if not piece:
            return
        content = piece
        if self._parser.is_inside or self._parser.may_open:
            content = self._feed(piece, token)
        if content and self.may_open and not self._parser.is_inside:
            self._take_content(content, token)

    def close(self) -> None:
        """End the open section."""
        self._parser = ThinkParser(is_open=True)
        self._parser.feed(CLOSE)

    def _feed(self, piece: str, token: int) -> str:
        """Feed text to the parser of a section; return what follows the section."""
        parser, tag = self._parser, self._rules.call_tag
        is_call = tag is not None and token == tag.token_id and tag.text in piece
        was_opened = parser.is_opened_by_tag
        segments = parser.feed(piece, [piece.rfind(tag.text)] if tag is not None and is_call else ())
        self.num_sections += parser.is_opened_by_tag and not was_opened
        return "".join(segment.text for segment in segments if segment.kind is SegmentKind.CONTENT)

    def _take_content(self, content: str, token: int) -> None:
        tag = self._rules.call_tag
        if tag is not None:
            self._end += content
            self.may_open = tag.text not in self._end
            self._end = self._end[1 - len(tag.text) :]
        line = self._line + content
        found = OPENING.search(line)
        if self._opening_id is not None:
            found = re.search(OPEN, content) if token == self._opening_id else None
        if found is not None and self.may_open:
            self._parser = ThinkParser.of(self._rules._replace(is_open=False, is_continued=False))
            self._parser.feed(OPEN + found.string[found.end() :])
            self.num_sections += 1
            self._line = ""
        else:
            line = line[line.rfind("\n") + 1 :].lstrip(" \t")
            self._line = line if OPEN.startswith(line) else "."


class ReasoningCount:
    """Counts the tokens of an output's first section of reasoning, with its tags, but without that of a call."""

    def __init__(self, tokenizer: Any, rules: ReasoningRules, hidden_ids: frozenset[int] | None) -> None:
        self.num_tokens = 0
        self._is_ended = False
        self._watch = ReasoningWatch(tokenizer, rules, hidden_ids)

    def append(self, token: int) -> None:
        """Append a token."""
        if self._is_ended:
            return
        watch = self._watch
        was_open = watch.is_open
        watch.append(token)
        if watch.is_open or watch.is_undecided:
            self.num_tokens += 1
            return
        self._is_ended = True
        self.num_tokens += was_open and not watch.is_ended_by_call
        if not watch.num_sections:
            self.num_tokens = 0


class BudgetMatcher:
    """The progress of one output to the end of its reasoning's budget; a ``TokenMatcher``.

    Args:
        grammar: the matcher of the grammar that begins after the reasoning; None: the output is free.
    """

    def __init__(
        self,
        budget: ThinkingBudget,
        tokenizer: Any,
        hidden_ids: frozenset[int] | None = None,
        grammar: TokenMatcher | None = None,
    ) -> None:
        self._budget = budget
        self._grammar = grammar
        self._watch = ReasoningWatch(tokenizer, budget.rules, hidden_ids)
        self._num_used = budget.num_used
        self._forced: tuple[int, ...] = ()
        """The tokens that are allowed next, one after the other; empty: any are."""
        self._force_if_used()

    @property
    def num_free_tokens(self) -> int:
        """As many next tokens may be any, whatever they are."""
        if self._forced or self._grammar is not None:
            return 0
        if self._watch.is_open:
            return self._budget.max_tokens - self._num_used
        return self._budget.max_tokens + 1 if self._watch.may_open else UNCONSTRAINED

    def append(self, token: int) -> None:
        """Advance by the sampled token."""
        watch, num_sections, was_open = self._watch, self._watch.num_sections, self._watch.is_open
        if self._grammar is not None:
            self._grammar.append(token)
        watch.append(token)
        if self._forced:
            if token != self._forced[0]:  # the grammar does not take the forced token yet
                self._forced = self._forced if watch.is_open else ()
                return
            self._forced = self._forced[1:]
            if not self._forced and watch.is_open:
                watch.close()
        elif watch.is_open:
            is_new = watch.num_sections > num_sections
            self._num_used = 0 if is_new or not was_open else self._num_used + 1
            self._force_if_used()

    def fill(self, words: NDArray[np.int32], row: int) -> None:
        """Set the bits of the tokens allowed next; clear all others."""
        words[row] = -1
        if self._grammar is not None:
            self._grammar.fill(words, row)
        if self._forced:
            word, bit = self._forced[0] // 32, np.uint32(1 << self._forced[0] % 32)
            # A grammar takes no other text inside a character: the tokens that complete it come first.
            if words.view(np.uint32)[row, word] & bit:
                words[row] = 0
                words.view(np.uint32)[row, word] = bit

    def _force_if_used(self) -> None:
        if self._watch.is_open and self._num_used >= self._budget.max_tokens:
            self._forced = self._budget.end_ids
