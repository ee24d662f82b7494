"""Texts of excerpts begin with a whole word, end with a whole character, and are shown only where texts may be."""

import pytest

from strandline.records.excerpts import BEFORE_TOKENS, EXCERPT_TOKENS, excerpt
from strandline.records.tokens import encode
from strandline.text.cache_report import excerpt_text
from tests.cpu.engine.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.mark.parametrize(
    ("text", "start", "shown"),
    [
        ("the capital of Rome", 9, "capital of Rome"),
        ("the capital of Rome", 4, "capital of Rome"),
        ("the capital of Rome", 11, " of Rome"),
        ("Today is 2026-11-22. Be", 18, "2026-11-22. Be"),
        ("in Rome.<|im_end|>", 8, "<|im_end|>"),
        ("Rome", 2, "Rome"),
        ("Rome", 0, "Rome"),
        ("Rome", 4, ""),
        ("so naïve", 6, "naïve"),
        ("x" + "€" * 40, 0, "x" + "€" * ((EXCERPT_TOKENS - 1) // 3)),
        ("x" * 40, 30, "x" * (BEFORE_TOKENS + 10)),
    ],
)
def test_excerpt_begins_with_a_word_and_ends_with_a_character(text: str, start: int, shown: str) -> None:
    assert excerpt_text(excerpt(encode(TOKENIZER.encode(text)), start), TOKENIZER.decode) == shown


def test_excerpt_has_no_text_where_none_is_shown() -> None:
    assert excerpt_text(None, TOKENIZER.decode) is None
    assert excerpt_text(excerpt(encode([1, 2]), 1), lambda _: None) is None
