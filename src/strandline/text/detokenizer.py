"""Incremental detokenization and stop strings.

While a request runs, text that could be the beginning of a stop string is held back, so that text that was streamed is
never retracted.
"""

from typing import Any

from tokenizers.decoders import DecodeStream

from strandline.records.sampling_params import SamplingParams


class Detokenizer:
    """Detokenizes one output."""

    def __init__(self, tokenizer: Any, params: SamplingParams, hidden_ids: frozenset[int] | None = None) -> None:
        """
        Args:
            tokenizer: a transformers tokenizer with a ``tokenizers`` backend.
            params: for stop strings and the handling of special tokens.
            hidden_ids: tokens that the text leaves out, instead of the special ones.
        """
        self._backend = tokenizer.backend_tokenizer
        self._hidden_ids = hidden_ids or frozenset()
        self._skip_special_tokens = params.skip_special_tokens and hidden_ids is None
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._held_back = max((len(stop) for stop in self._stops), default=1) - 1
        self._token_ids: list[int] = []
        self._text = ""
        self._num_taken = 0
        """Number of characters returned by ``take``."""
        self._is_done = False

    def take(self) -> str:
        """Return the new text that can be shown.

        Until the output is finished, text that may be the beginning of a stop string is held back.
        """
        end = len(self._text) if self._is_done else max(len(self._text) - self._held_back, self._num_taken)
        taken = self._text[self._num_taken : end]
        self._num_taken = end
        return taken

    def append(self, token: int, *, may_stop: bool) -> str | None:
        """Append a token; return the stop string that it completes, if any.

        Args:
            may_stop: False while the output has fewer than ``min_tokens``.
        """
        if token in self._hidden_ids:
            return None
        self._token_ids.append(token)
        piece = self._stream.step(self._backend, token)
        if not piece:
            return None
        searched = max(len(self._text) - self._held_back, 0)
        self._text += piece
        return self._find_stop(searched) if may_stop else None

    def finish(self) -> None:
        """Complete the text up to the last token; incomplete characters become U+FFFD."""
        if self._is_done:
            return
        self._is_done = True
        whole = self._backend.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        if len(whole) > len(self._text) and whole.startswith(self._text):
            self._text = whole

    def _find_stop(self, start: int) -> str | None:
        found = [(self._text.find(stop, start), stop) for stop in self._stops]
        places = [(place, stop) for place, stop in found if place >= 0]
        if not places:
            return None
        place, stop = min(places)
        self._text = self._text[: place + (len(stop) if self._keep_stop else 0)]
        self._is_done = True
        return stop
