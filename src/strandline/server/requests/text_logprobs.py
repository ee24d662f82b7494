"""Log-probabilities of the tokens that a message's text is made of, among those of a whole output."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from strandline.records.outputs import OutputDelta
from strandline.server.requests.usage_and_logprobs import Entry, Json, TokenName, chat_logprobs, text_name


@dataclass(slots=True)
class Tokens:
    """Tokens that make characters together: one token, or several that are parts of a character."""

    start: int
    """Their first character in the output."""
    end: int | None = None
    """The end of their characters; None: not known before another token."""
    entries: list[Entry] = field(default_factory=list)
    is_taken: bool = False
    """Whether they have been returned for the current text."""


class TextLogprobs:
    """Keeps the log-probabilities of an output's tokens until a text takes them.

    Tokens that make parts of two texts are returned for both. Those whose characters no text has are dropped, and those
    that make no characters.

    Args:
        num_top: most likely tokens per position; None: all that are reported, and the sampled one.
        name: how tokens are named.
    """

    def __init__(self, num_top: int | None, name: TokenName = text_name) -> None:
        self._num_top = num_top
        self._name = name
        self._waiting: deque[Tokens] = deque()

    def add(self, output: OutputDelta) -> None:
        """Add tokens."""
        for entry, span in zip(output.logprobs or (), output.token_spans, strict=True):
            if span is None:
                continue
            start, end = span
            if not self._waiting or self._waiting[-1].end is not None:
                self._waiting.append(Tokens(start))
            last = self._waiting[-1]
            last.entries.append(entry)
            last.end = end if end > start else None

    def begin(self) -> None:
        """Begin another text."""
        if self._waiting:
            self._waiting[0].is_taken = False

    def take(self, spans: Iterable[Sequence[int]]) -> list[Json]:
        """Return the log-probabilities of the tokens that make characters ``[start, end)`` of the output.

        Args:
            spans: characters that were appended to the text, in ascending order, after those of earlier calls.
        """
        found: list[Entry] = []
        for start, end in spans:
            while self._waiting and self._waiting[0].start < end:
                tokens = self._waiting[0]
                is_part = tokens.end is None or tokens.end > start
                if is_part and not tokens.is_taken:
                    found += tokens.entries
                    tokens.is_taken = True
                if tokens.end is None or tokens.end > end:
                    break
                self._waiting.popleft()
        content: list[Json] = chat_logprobs(found, self._num_top, name=self._name)["content"]
        return content
