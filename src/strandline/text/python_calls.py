"""Parser for tool calls in Python syntax: ``[weather(city="Ulm", days=2), clock()]`` between two tags.

A call is emitted once it is complete, because until then it could be plain text. Python's reserved names and JSON's
``true``, ``false`` and ``null`` are accepted, because models write them. Nothing is evaluated.
"""

import ast
import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Collection
from itertools import pairwise
from typing import Any, Final

from strandline.text.json_calls import SEPARATORS, parse_json
from strandline.text.parameter_sets import parameter_sets
from strandline.text.segments import Segment, SegmentKind, content, split_at_tag, split_space
from strandline.text.tool_calls import Schemas

NAME: Final = re.compile(r"[\w.-]{1,256}")
MAX_HEAD_CHARACTERS: Final = 512
"""Maximum length of a function's name with the white space after it."""
KEYWORD: Final = re.compile(r"[\w-]+")
"""Names of parameters that are accepted even if the schema does not list them."""
LISTED: Final = re.compile(r"[^\"'()\[\]{}<>,=]+")
"""Names of parameters that are accepted only if the schema lists them."""
WORDS: Final = {"true": True, "false": False, "null": None}


class PythonCalls:
    """Parses the calls between two tags.

    Args:
        opener: the tag that was found.
        close: the closing tag, ignored inside strings.
        schemas: the parameters' order, for arguments without a name.
    """

    def __init__(self, opener: str, close: str, schemas: Schemas) -> None:
        self._close = close
        self._schemas = schemas
        self._raw = [opener]
        """Text read since the last call."""
        self._text = ""
        """Text that has not been parsed yet."""
        self._num_fed = len(opener)
        self._name = ""
        self._scanner = Scanner()
        self._step = self._between
        self._rest: str | None = None

    def feed(self, text: str, segments: list[Segment]) -> str | None:
        self._num_fed += len(text)
        self._text += text
        while self._rest is None and self._step(segments):
            pass
        return self._rest

    def finish(self, segments: list[Segment]) -> None:
        held = self._scanner.text if self._step == self._in_call else self._text
        text = "".join([*self._raw, held])
        if text.strip(SEPARATORS):
            segments.append(content(text, self._num_fed))

    # States of the parser. Each returns whether the next one can run on the remaining text.

    def _between(self, segments: list[Segment]) -> bool:
        space, stripped = split_space(self._text, SEPARATORS)
        self._raw.append(space)
        self._text = stripped
        name = NAME.match(stripped)
        following = stripped[name.end() :].lstrip() if name else stripped
        head = stripped[: len(stripped) - len(following)]
        is_short = len(head) <= MAX_HEAD_CHARACTERS
        if (not following and is_short) or (self._close.startswith(stripped) and stripped != self._close):
            return False
        if stripped.startswith(self._close) and not "".join(self._raw).strip(SEPARATORS):
            self._rest = stripped[len(self._close) :]
            return False
        if name and is_short and following.startswith("("):
            self._raw.append(head + "(")
            self._name, self._text, self._scanner, self._step = name[0], following[1:], Scanner(), self._in_call
        else:
            self._step = self._lost
        return True

    def _in_call(self, segments: list[Segment]) -> bool:
        rest = self._scanner.feed(self._text)
        self._text = rest or ""
        if rest is None:
            return False
        arguments = None if self._scanner.is_wrong else self._arguments(self._scanner.parts())
        if arguments is None:
            self._raw.append(self._scanner.text)
            self._step = self._lost
            return True
        segments += [Segment(SegmentKind.CALL, self._name), Segment(SegmentKind.ARGUMENTS, arguments)]
        self._raw, self._step = [], self._between
        return True

    def _lost(self, segments: list[Segment]) -> bool:
        """Emit text that is not a call as content, up to the closing tag."""
        split = split_at_tag(self._text, (self._close,))
        text = "".join([*self._raw, split.before, split.tag or ""])
        segments.append(content(text, self._num_fed - len(split.after)))
        self._raw = []
        self._text = split.after
        self._rest = split.after if split.tag else None
        return False

    def _arguments(self, parts: list[str]) -> str | None:
        """Return a call's arguments as JSON; None if they are malformed."""
        sets = parameter_sets(self._schemas.get(self._name, {}))
        names = list(dict.fromkeys(name for each in sets for name in each.properties))
        found: dict[str, Any] = {}
        try:
            for index, part in enumerate(parts):
                keyword, value = split_keyword(part, names)
                found[names[index] if keyword is None else keyword] = parse_literal(value)
            text = json.dumps(found, ensure_ascii=False, allow_nan=False)
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except (ValueError, SyntaxError, IndexError, RecursionError, MemoryError):
            return None


class Scanner:
    """Finds the end of a call's arguments, and the commas between them."""

    def __init__(self) -> None:
        self.is_wrong = False
        """Whether the arguments contain a character that no call can contain."""
        self._pieces: list[str] = []
        self._num_characters = 0
        self._commas: list[int] = []
        self._brackets: list[str] = []
        self._opening = ""
        """One or two quotation marks that may start a triple-quoted string."""
        self._quote = ""
        """The closing quotation mark; empty outside of strings."""
        self._num_quotes = 0
        self._is_escaped = False
        self._closed: tuple[str, int] | None = None
        """A quotation mark that ends a string, and its index, unless a word follows."""
        self._inner: list[int] = []
        """Quotation marks inside strings that lack a backslash: templates write strings unescaped, and models too."""

    @property
    def text(self) -> str:
        """The arguments so far, with the closing parenthesis."""
        return "".join(self._pieces)

    def feed(self, text: str) -> str | None:
        """Add text; return the text after the call, or None while it continues."""
        for index, character in enumerate(text, 1):
            if self._take(character, self._num_characters + index - 1):
                self._pieces.append(text[:index])
                return text[index:]
        self._pieces.append(text)
        self._num_characters += len(text)
        return None

    def parts(self) -> list[str]:
        """Return the source text of each argument of a complete call."""
        text = self.text
        cuts = [-1, *self._commas, len(text) - 1]
        parts = [self._escaped(text, start + 1, end) for start, end in pairwise(cuts)]
        return parts if parts[-1].strip() else parts[:-1]

    def _escaped(self, text: str, start: int, end: int) -> str:
        """Return a part of the text with a backslash before each quotation mark inside a string."""
        inner = self._inner[bisect_left(self._inner, start) : bisect_left(self._inner, end)]
        return "\\".join(text[first:last] for first, last in pairwise([start, *inner, end]))

    def _take(self, character: str, index: int) -> bool:
        """Consume a character; return whether it ends the call."""
        if self._closed is not None and not character.isspace():
            (mark, closed_at), self._closed = self._closed, None
            if character.isalnum() or character == "_":
                self._quote = mark
                self._inner.append(closed_at)
        if self._opening:
            if character == self._opening[0]:
                self._opening += character
                if len(self._opening) == 3:
                    self._quote, self._opening = self._opening, ""
                return False
            self._quote = self._opening if len(self._opening) == 1 else ""
            self._opening = ""
        if self._quote:
            self._take_string(character, index)
            return False
        if character in "\"'":
            self._opening = character
        elif character in "([{":
            self._brackets.append(")]}"["([{".index(character)])
        elif character in ")]}" and self._brackets:
            self.is_wrong = character != self._brackets.pop()
        elif character in ")]}<>":
            self.is_wrong = character != ")"
            return True
        elif character == "," and not self._brackets:
            self._commas.append(index)
        return self.is_wrong

    def _take_string(self, character: str, index: int) -> None:
        if self._is_escaped or character != self._quote[0]:
            self._is_escaped = character == "\\" and not self._is_escaped
            self._num_quotes = 0
            return
        self._num_quotes += 1
        if self._num_quotes == len(self._quote):
            self._closed = (self._quote, index) if self._num_quotes == 1 else None
            self._quote, self._num_quotes = "", 0


def split_keyword(argument: str, names: Collection[str]) -> tuple[str | None, str]:
    """Return the source text of an argument's name and value. The name is None if there is none.

    Args:
        names: names of the parameters that the schema lists.
    """
    before, sign, value = argument.partition("=")
    name = before.strip()
    is_name = KEYWORD.fullmatch(name) or (name in names and LISTED.fullmatch(name))
    return (name, value) if sign and is_name else (None, argument)


def parse_literal(text: str) -> Any:
    """Return the value of a literal: string, number, boolean, None, or list or dictionary of literals.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is not a literal.
    """
    if (value := parse_json(text)) is not None:
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unknown escapes
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except SyntaxError:  # models write unescaped line breaks in strings
            tree = ast.parse(text.strip().replace("\n", "\\n"), mode="eval")
    return _value(tree.body)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id="true" | "false" | "null" as name):
            return WORDS[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError(f"not a literal: {ast.dump(node)[:100]}")
