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
        self._num_tokens = 0

    def append(self, token: int) -> str | None:
        """Append a token; return the stop string that it completes, if any."""
        self._num_tokens += 1
        return self._detokenizer.append(token, may_stop=self._num_tokens > self._min_tokens)
