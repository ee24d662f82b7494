"""Text of tokens as they come."""

from typing import Any, Final

from tokenizers.decoders import DecodeStream

INVALID_PREFIX: Final = "Invalid prefix encountered"
"""How the error begins with which ``tokenizers`` says that a token changes the text before it."""


class TokenStream:
    """Turns the tokens of one output into text.

    Where tokens are bytes, some that form no character turn earlier ones of the same run, whose text has been returned,
    into U+FFFD. The text then continues with the token after them: what was held back is left out.
    """

    def __init__(self, backend: Any, *, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def step(self, token: int) -> str | None:
        """Append a token; return the text that it adds, if any."""
        try:
            return self._stream.step(self._backend, token)
        except Exception as error:  # the library's errors have no class of their own
            if not str(error).startswith(INVALID_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            return self._stream.step(self._backend, token)
