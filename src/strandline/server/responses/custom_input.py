"""The input of a custom tool, read from the arguments of the function that stands for it."""

import json
import re
from typing import Final

from strandline.server.responses.tools import INPUT
from strandline.text.json_calls import parse_json

HEAD: Final = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
WHOLE: Final = re.compile(
    r"""(?:[^"\\]                                              # a character
        |\\[^u]                                               # an escape
        |\\u(?![dD][89abAB])[0-9A-Fa-f]{4}
        |\\u[0-9A-Fa-f]{4}(?=[^\\]|\\[^u]|\\u[0-9A-Fa-f]{4})  # the first half of a character, and what follows it
        |\\u(?=[0-9A-Fa-f]{0,3}[^0-9A-Fa-f])                  # no escape
    )*""",
    re.VERBOSE,
)
"""The part of a string's text that can be decoded."""


class CustomInput:
    """Decodes ``{"input": "…"}`` as it arrives. Other arguments are returned at the end: a text as it is."""

    def __init__(self) -> None:
        self._text = ""
        """Arguments, then the part of the string that has not been decoded."""
        self._is_string = False
        self._is_complete = False

    def feed(self, text: str) -> str:
        """Add a part of the arguments; return the input that is certain so far."""
        self._text += text
        if not self._is_string:
            head = HEAD.match(self._text)
            if head is None:
                return ""
            self._is_string = True
            self._text = self._text[head.end() :]
        if self._is_complete:
            return ""
        found = WHOLE.match(self._text)
        end = found.end() if found else 0
        self._is_complete = self._text[end : end + 1] == '"'
        taken, self._text = self._text[:end], self._text[end:]
        return _decoded(taken)

    def finish(self) -> str:
        """End the arguments; return the rest of the input."""
        if self._is_string or not self._text:
            return ""
        value = parse_json(self._text)
        texts = list(value.values()) if isinstance(value, dict) else [value]
        return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else self._text


def _decoded(text: str) -> str:
    """Return the characters of a JSON string's text; invalid escapes as they are."""
    try:
        decoded = str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        decoded = text
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
