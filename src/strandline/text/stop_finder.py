"""Detection of stop strings during sampling, so that no state advances past the token that completes one.

The text part detects them again to truncate the text; both use a ``Detokenizer``.
"""

from typing import Any

from strandline.records.plan import NewRequest
from strandline.text.detokenizer import Detokenizer


class TextStopFinder:
    """Finds the stop strings of one output; a ``StopFinder``."""

    def __init__(self, tokenizer: Any, new: NewRequest) -> None:
        self._detokenizer = Detokenizer(tokenizer, new.params, new.hidden_ids, new.reasoning)
        self._min_tokens = new.params.min_tokens
        self._ends: list[int] = []
        """The length of the text after each token."""
        self.num_stop_tokens = 0
        """The last tokens that belong to a stop string which the text leaves out, or may turn out to."""

    def append(self, token: int) -> str | None:
        """Append a token; return the stop string that it completes, if any."""
        detokenizer, ends = self._detokenizer, self._ends
        may_stop = len(ends) >= self._min_tokens
        stop = detokenizer.append(token, may_stop=may_stop)
        ends.append(detokenizer.num_characters)
        start = detokenizer.find_possible_stop()
        self.num_stop_tokens = 0 if start is None else self._num_tokens_from(start, is_stopped=stop is not None)
        return stop

    def _num_tokens_from(self, character: int, *, is_stopped: bool) -> int:
        """Return how many tokens have text from a character on, or parts of a character's.

        Args:
            is_stopped: the text has been truncated before the last token's.
        """
        ends, count = self._ends, int(is_stopped)
        while count < len(ends) and (ends[-1 - count] > character or (count and self._adds_nothing(-1 - count))):
            count += 1
        return count

    def _adds_nothing(self, index: int) -> bool:
        """Return whether a token has added no text: the next one completes its character."""
        before = self._ends[index - 1] if -index < len(self._ends) else 0
        return self._ends[index] == before
