"""How the documentation is written: line lengths, and words that it avoids."""

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
    if "results" not in path.parts
}
CODE = re.compile(r"^(```|~~~).*?^\1$|`[^`\n]*`", re.DOTALL | re.MULTILINE)

AVOIDED: Mapping[str, str] = {
    "definitions? of right": "reference implementation",
    "twins?": "backend, or Triton version",
    "recorded steps?": "CUDA graph",
    "made-up requests?": "warm-up request",
    "take note": "record, or count",
    "so many": "a number with its unit",
    "whoever|nobody|somebody|anybody": "the subject: a request, a user",
    "stands? aside": "is queued",
    "mend(?:s|ed|ing)?": "fix",
    "of which": "two sentences",
}
"""Phrases that translate back into another language rather than say what happens, and what to write instead."""


def lines_of_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a page outside code blocks, tables, headings and link definitions."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"\s*(```|~~~)", line):
            fence = "" if fence == found[1] else fence or found[1]
        elif not fence and not re.match(r"\s*(\||#|!\[|\[[^\]]+\]: )", line):
            yield number, line


def long_lines(text: str) -> list[int]:
    """Return the numbers of the lines that are too long and could be wrapped: not those of one long word or link."""
    return [
        number
        for number, line in lines_of_prose(text)
        if len(line) > MAX_COLUMNS and " " in re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "", line)
    ]


def avoided_phrases(text: str) -> list[str]:
    """Return the phrases of a page, code left out, that have a plainer form."""
    prose = " ".join(CODE.sub("", text).split())
    return [
        f"{found[0]!r}: write {better}"
        for phrase, better in AVOIDED.items()
        for found in re.finditer(rf"\b(?:{phrase})\b", prose, re.IGNORECASE)
    ]


@pytest.mark.parametrize("name", PAGES)
def test_documentation_wraps(name: str) -> None:
    assert long_lines(PAGES[name]) == []


@pytest.mark.parametrize("name", PAGES)
def test_documentation_avoids_phrases(name: str) -> None:
    assert avoided_phrases(PAGES[name]) == []


# The checks themselves: each finds a fault that was put in.


@pytest.mark.parametrize("text", ["word " * 30, "- " + "word " * 30, "```\nx\n```\n" + "word " * 30])
def test_long_line_is_found(text: str) -> None:
    assert len(long_lines(text)) == 1


@pytest.mark.parametrize(
    "text", ["word " * 20, "| " + "word " * 30, "```\n" + "word " * 30 + "\n```", "- " + "x" * 130, "x" * 130]
)
def test_line_that_cannot_wrap_passes(text: str) -> None:
    assert long_lines(text) == []


@pytest.mark.parametrize("text", ["its Triton twin", "of so\nmany tokens", "**Whoever** asks", "a definition of right"])
def test_avoided_phrase_is_found(text: str) -> None:
    assert avoided_phrases(text)


@pytest.mark.parametrize("text", ["`twin`", "```\nnobody\n```", "as soon as", "amendment"])
def test_plain_phrase_passes(text: str) -> None:
    assert avoided_phrases(text) == []
