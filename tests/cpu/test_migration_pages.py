"""The pages for users of other servers name only flags that exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from strandline.cli import build_parser
from strandline.engine.foreign_methods import FOREIGN_METHODS
from strandline.foreign_flags import FOREIGN_FLAGS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["from-vllm.md", "from-sglang.md"]
FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][a-z0-9-]*")


def rows(page: str) -> Iterator[tuple[set[str], set[str]]]:
    """Yield the other server's flags and ours, for each row of a page's table of flags."""
    table = (DOCS / page).read_text().partition("## Flags")[2]
    for line in table.splitlines():
        if line.startswith("| ") and "---" not in line:
            theirs, ours = (set(FLAG.findall(cell)) for cell in line.split("|")[1:3])
            yield theirs, ours


def serve_flags() -> set[str]:
    return set(build_parser().parse_args(["serve"]).parser._option_string_actions)


@pytest.mark.parametrize("page", PAGES)
def test_our_flags_exist(page: str) -> None:
    ours = {flag for _, flags in rows(page) for flag in flags}
    assert len(ours) > 20
    assert ours - serve_flags() == set()


@pytest.mark.parametrize("page", PAGES)
def test_flags_without_counterpart_are_not_ours(page: str) -> None:
    for theirs, ours in rows(page):
        if not ours:
            assert theirs & serve_flags() == set()


@pytest.mark.parametrize("page", PAGES)
def test_error_about_a_foreign_flag_names_ours(page: str) -> None:
    for theirs, ours in rows(page):
        for flag in theirs - serve_flags():
            assert not ours or any(each in FOREIGN_FLAGS[flag] for each in ours), flag


def test_foreign_flags_are_on_a_page_and_name_ours() -> None:
    named = {flag for page in PAGES for theirs, _ in rows(page) for flag in theirs}
    assert set(FOREIGN_FLAGS) - named == set()
    advice = {flag for reason in FOREIGN_FLAGS.values() for flag in FLAG.findall(reason)}
    assert advice - serve_flags() == set()


def test_foreign_methods_are_on_the_page_of_vllm() -> None:
    page = (DOCS / "from-vllm.md").read_text()
    assert [name for name in FOREIGN_METHODS if f"`LLM.{name}`" not in page] == []
