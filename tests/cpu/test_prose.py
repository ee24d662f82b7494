"""How documentation, code and tests are written: line lengths, avoided phrases, and the length of test names."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_COLUMNS = 120
FOLDERS = ("docs", "src", "tests", "tools", "benchmarks")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
}
RESULTS = "benchmarks/results/"
"""Records of the past: their words stay as they were written."""
CODE = re.compile(r"^(```|~~~).*?^\1$|`[^`\n]*`", re.DOTALL | re.MULTILINE)

MODULES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ("src", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
VOCABULARIES = frozenset({"src/strandline/demo/words.py", "src/strandline/demo/intents.py"})
"""Modules whose strings are training data: sentences of the demo's language, not prose about the project."""

# Bracketed letters keep this file clean too.
AVOIDED: Mapping[str, str] = {
    "definitions? [o]f right": "reference implementation",
    "[t]wins?": "backend, or Triton version",
    "[r]ecorded steps?": "CUDA graph",
    "[m]ade-up requests?": "warm-up request",
    "[t]akes? note": "record, or count",
    "[s]o many": "a number with its unit",
    "[w]hoever|[n]obody|[s]omebody|[a]nybody": "the subject: a request, a user",
    "stands? [a]side": "is queued",
    "[m]end(?:s|ed|ing)?": "fix",
    "[o]f which": "two sentences",
    "[i]n place of": "instead of",
    "[t]alks? (?:to|through)|[t]ells? whether|(?:are|is|be) [t]old": "connects to, sends, reports, is notified",
    "[s]eems? to": "the condition that is checked",
    "[k]nown of|[a]sked of": "the data of, requested from",
    "what only [m]emory": "entries that are only in memory",
}
"""Phrases that translate back into another language rather than say what happens, and what to write instead."""

FRAGMENT = re.compile(r'^\s*"""Of ', re.MULTILINE)
"""A docstring that continues the name above it instead of a phrase that stands alone."""

MAX_NAME_WORDS = 10


def lines_of_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a page outside code blocks, tables, headings and link definitions."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"\s*(```|~~~)", line):
            fence = "" if fence == found[1] else fence or found[1]
        elif not fence and not re.match(r"\s*(\||#|!\[|\[[^\]]+\]: )", line):
            yield number, line


def long_lines(text: str) -> list[int]:
    """Return the numbers of the lines that are too long and can be wrapped: are not one word, link or code span."""
    return [
        number
        for number, line in lines_of_prose(text)
        if len(line) > MAX_COLUMNS and " " in re.sub(r"^\s*(?:[-*]|\d+\.)\s+|`[^`]+`", "", line)
    ]


ANY_AVOIDED = re.compile(rf"\b(?:{'|'.join(f'(?:{phrase})' for phrase in AVOIDED)})\b", re.IGNORECASE)
"""Matches where any of the phrases does, in one search instead of one for each."""


def avoided_phrases(text: str) -> list[str]:
    """Return the phrases of a text that have a plainer form."""
    prose = " ".join(re.sub(r"^\s*#", "", text, flags=re.MULTILINE).split())
    if ANY_AVOIDED.search(prose) is None:
        return []
    return [
        f"{found[0]!r}: write {better}"
        for phrase, better in AVOIDED.items()
        for found in re.finditer(rf"\b(?:{phrase})\b", prose, re.IGNORECASE)
    ]


def long_test_names(text: str) -> list[str]:
    """Return the names of a module's tests that have too many words."""
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if len(node.name.removeprefix("test_").split("_")) > MAX_NAME_WORDS
    ]


def test_documentation_wraps() -> None:
    found = {name: long_lines(text) for name, text in PAGES.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_documentation_avoids_phrases() -> None:
    pages = {name: CODE.sub("", text) for name, text in PAGES.items() if not name.startswith(RESULTS)}
    found = {name: avoided_phrases(text) for name, text in pages.items()}
    assert {name: phrases for name, phrases in found.items() if phrases} == {}


def test_modules_avoid_phrases() -> None:
    found = {name: avoided_phrases(text) for name, text in MODULES.items() if name not in VOCABULARIES}
    assert {name: phrases for name, phrases in found.items() if phrases} == {}


def test_no_docstring_continues_the_name_above_it() -> None:
    assert [name for name, text in MODULES.items() if FRAGMENT.search(text)] == []


def test_names_of_tests_have_at_most_ten_words() -> None:
    tests = {name: text for name, text in MODULES.items() if name.startswith("tests/")}
    found = {name: sorted(long_test_names(text)) for name, text in tests.items()}
    assert {name: names for name, names in found.items() if names} == {}


# The checks themselves: each finds a fault that was put in.


def test_docstring_that_continues_a_name_is_found() -> None:
    assert FRAGMENT.search('size: int\n    """' + 'Of the items."""')


@pytest.mark.parametrize("text", ["word " * 30, "- " + "word " * 30, "```\nx\n```\n" + "word " * 30])
def test_long_line_is_found(text: str) -> None:
    assert len(long_lines(text)) == 1


@pytest.mark.parametrize(
    "text", ["word " * 20, "| " + "word " * 30, "```\n" + "word " * 30 + "\n```", "- " + "x" * 130, "x" * 130]
)
def test_line_that_cannot_wrap_passes(text: str) -> None:
    assert long_lines(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "its Triton t" + "win",
        "of so\nmany tokens",
        "# so\n    # many",
        "**W" + "hoever** asks",
        "a definition o" + "f right",
    ],
)
def test_avoided_phrase_is_found(text: str) -> None:
    assert avoided_phrases(text)


@pytest.mark.parametrize("text", ["`t" + "win`", "```\nno" + "body\n```", "as soon as", "amendment"])
def test_plain_phrase_passes(text: str) -> None:
    assert avoided_phrases(CODE.sub("", text)) == []


def test_long_name_of_test_is_found() -> None:
    name = "_".join(["test", *"abcdefghij"])
    module = f"class TestX:\n    def {name}(self): pass\n\nasync def {name}_k(): pass\ndef helper_{name}_k(): pass\n"
    assert long_test_names(module) == [f"{name}_k"]
