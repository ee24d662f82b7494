"""Incremental detokenization and stop strings.

While a request runs, text that could be the beginning of a stop string is held back, so that text that was streamed is
never retracted. Where reasoning is parsed, stop strings are searched in the content after it.
"""

from typing import Any, Final, NamedTuple

from strandline.records.reasoning_rules import ReasoningRules
from strandline.records.sampling_params import SamplingParams
from strandline.text.reasoning import ThinkParser
from strandline.text.token_stream import TokenStream

POSSIBLE_CHARACTERS: Final = 64
"""The last characters of a text that are searched for the beginning of a stop string."""


class TakenText(NamedTuple):
    """Text that can be shown."""

    text: str
    call_marks: tuple[int, ...]
    """The characters of the text at which a special token opens a tool call."""


class Detokenizer:
    """Detokenizes one output."""

    def __init__(
        self,
        tokenizer: Any,
        params: SamplingParams,
        hidden_ids: frozenset[int] | None = None,
        reasoning: ReasoningRules | None = None,
    ) -> None:
        """
        Args:
            tokenizer: a transformers tokenizer with a ``tokenizers`` backend.
            params: stop strings, and the handling of special tokens.
            hidden_ids: tokens that the text leaves out, instead of the special ones.
            reasoning: the rules of the reasoning, which stop strings do not end; None: they hold everywhere.
        """
        self._backend = tokenizer.backend_tokenizer
        self._hidden_ids = hidden_ids or frozenset()
        self._skip_special_tokens = params.skip_special_tokens and hidden_ids is None
        self._stream = TokenStream(self._backend, skip_special_tokens=self._skip_special_tokens)
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._held_back = max((len(stop) for stop in self._stops), default=1) - 1
        self._call_tag = reasoning.call_tag if reasoning is not None else None
        self._think = ThinkParser.of(reasoning) if reasoning is not None and self._stops else None
        self._token_ids: list[int] = []
        self._num_shown_tokens = 0
        """Tokens up to the last one that added text: after it, the text is that of all tokens."""
        self._text = ""
        self._marks: list[int] = []
        """The characters at which a special token opens a tool call, of the text that has not been taken."""
        self._num_taken = 0
        """Number of characters returned by ``take``."""
        self._num_searched = 0
        """Number of characters at which no stop string begins that counts."""
        self._is_done = False
        self._stop_start: int | None = None
        """The character at which the stop string began that ended the text and is not a part of it."""

    @property
    def num_characters(self) -> int:
        """The length of the text so far."""
        return len(self._text)

    def find_possible_stop(self) -> int | None:
        """Return the character at which a stop string begins, or may begin; None: none does that the text leaves out.

        Of very long stop strings, only the first characters count.
        """
        if self._is_done or self._keep_stop or self._think is not None:
            return self._stop_start
        text, begin = self._text, max(self._num_searched, len(self._text) - POSSIBLE_CHARACTERS)
        starts = [_possible_start(text, begin, stop) for stop in self._stops]
        return min((start for start in starts if start is not None), default=None)

    def take(self) -> TakenText:
        """Return the new text that can be shown.

        Until the output is finished, text that may be the beginning of a stop string is held back, or of a tag that
        decides whether stop strings hold.
        """
        start, end = self._num_taken, len(self._text)
        if not self._is_done:
            is_undecided = self._think is not None and self._think.may_open
            end = start if is_undecided else max(end - self._held_back, start)
        self._num_taken = end
        marks: tuple[int, ...] = ()
        if self._marks:
            marks = tuple(mark - start for mark in self._marks if mark < end)
            self._marks = [mark for mark in self._marks if mark >= end]
        return TakenText(self._text[start:end], marks)

    def leaves_out(self, token: int) -> bool:
        """Return whether a token is no part of a text, not even of one of its characters."""
        if token in self._hidden_ids:
            return True
        return not self._backend.decode([token], skip_special_tokens=self._skip_special_tokens)

    def append(self, token: int, *, may_stop: bool) -> str | None:
        """Append a token; return the stop string that it completes, if any.

        Args:
            may_stop: False while the output has fewer than ``min_tokens``.
        """
        if token in self._hidden_ids:
            return None
        self._token_ids.append(token)
        piece = self._stream.step(token)
        if not piece:
            return None
        self._num_shown_tokens = len(self._token_ids)
        marks = self._call_marks(token, piece) if self._call_tag is not None else []
        if marks:
            self._marks += [len(self._text) + mark for mark in marks]
        self._text += piece
        if not self._stops:
            return None
        if self._think is not None and not self._is_content_begun(self._think, piece, marks):
            return None
        stop = self._find_stop(self._num_searched) if may_stop else None
        self._num_searched = max(len(self._text) - self._held_back, self._num_searched)
        return stop

    def finish(self) -> None:
        """Complete the text up to the last token; incomplete characters become U+FFFD."""
        if self._is_done:
            return
        self._is_done = True
        rest = self._token_ids[self._num_shown_tokens :]
        if not self._backend.decode(rest, skip_special_tokens=self._skip_special_tokens):
            return  # none, or special tokens: the whole need not be decoded again
        whole = self._backend.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        if len(whole) > len(self._text) and whole.startswith(self._text):
            self._text = whole

    def _call_marks(self, token: int, piece: str) -> list[int]:
        """Return the character of a token's text at which a special token opens a call, if it is one."""
        tag = self._call_tag
        if tag is None or token != tag.token_id or tag.text not in piece:
            return []
        return [piece.rfind(tag.text)]

    def _is_content_begun(self, think: ThinkParser, piece: str, marks: list[int]) -> bool:
        """Add text to the reasoning or the content; return whether it is content, where stop strings count."""
        think.feed(piece, marks)
        if think.content_start is None:
            return False
        self._think, self._num_searched = None, think.content_start
        return True

    def _find_stop(self, start: int) -> str | None:
        found = [(self._text.find(stop, start), stop) for stop in self._stops]
        found_stops = [(index, stop) for index, stop in found if index >= 0]
        if not found_stops:
            return None
        index, stop = min(found_stops)
        self._stop_start = None if self._keep_stop else index
        self._text = self._text[: index + (len(stop) if self._keep_stop else 0)]
        self._is_done = True
        return stop


def _possible_start(text: str, begin: int, stop: str) -> int | None:
    """Return the first character from one on at which the rest of a text begins a stop string."""
    index = text.find(stop[0], begin)
    while index >= 0 and not stop.startswith(text[index:]):
        index = text.find(stop[0], index + 1)
    return index if index >= 0 else None
