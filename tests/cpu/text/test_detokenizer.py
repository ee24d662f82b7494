"""Incremental detokenization yields the text of the whole, wherever token boundaries are."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from strandline.records.sampling_params import SamplingParams
from strandline.text.detokenizer import Detokenizer
from tests.cpu.engine.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()


def feed(text: str, params: SamplingParams, *, may_stop: bool = True) -> tuple[list[str], str | None, str]:
    """Return what was shown after each token, the stop string that was hit, and the final text."""
    detokenizer, shown, stop = Detokenizer(TOKENIZER, params), list[str](), None
    for token in TOKENIZER.encode(text):
        stop = detokenizer.append(token, may_stop=may_stop)
        shown.append("".join(shown[-1:]) + detokenizer.take().text)
        if stop:
            break
    detokenizer.finish()
    return shown, stop, "".join(shown[-1:]) + detokenizer.take().text


@given(st.text(max_size=40))
def test_streams_grow_and_end_with_the_whole_text(text: str) -> None:
    shown, _, final = feed(text, SamplingParams(stop=["never in it \x00\x01"]))
    assert final == text
    for earlier, later in zip(shown, [*shown[1:], final], strict=False):
        assert later.startswith(earlier)


@given(st.text(max_size=20), st.text(min_size=1, max_size=4), st.text(max_size=20))
def test_stop_string_across_tokens_is_found_and_hidden(head: str, stop: str, tail: str) -> None:
    whole = head + stop + tail
    shown, found, final = feed(whole, SamplingParams(stop=[stop]))
    assert found == stop
    assert final == whole[: whole.index(stop)]
    assert all(final.startswith(text) for text in shown)


def test_the_stop_string_can_be_kept() -> None:
    assert feed("one two three", SamplingParams(stop=["two"], include_stop_str_in_output=True))[2] == "one two"


def test_the_earliest_of_several_stop_strings_counts() -> None:
    assert feed("a, b. c", SamplingParams(stop=[".", ","]))[1:] == (",", "a")


def test_stop_string_is_ignored_before_min_tokens() -> None:
    assert feed("stop", SamplingParams(stop=["stop"]), may_stop=False)[1:] == (None, "stop")


def test_incomplete_characters_are_shown_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams())
    for token in TOKENIZER.encode("aé")[:-1]:
        detokenizer.append(token, may_stop=True)
    assert detokenizer.take().text == "a"
    detokenizer.finish()
    assert detokenizer.take().text == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("text", ["naïve café", "日本語", "👩‍👩‍👧", "a\n\tb"])
def test_characters_of_several_bytes_appear_whole(text: str) -> None:
    shown, _, final = feed(text, SamplingParams())
    assert final == text
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in shown)


def test_hidden_tokens_replace_the_special_ones() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>", "<end>"]})
    text, (call, end) = "é<call>[x]é<call><end>", tokenizer.convert_tokens_to_ids(["<call>", "<end>"])
    for hidden, wanted in ((None, "é[x]é"), (frozenset({end}), "é<call>[x]é<call>"), (frozenset({call}), "é[x]é<end>")):
        detokenizer, shown = Detokenizer(tokenizer, SamplingParams(), hidden), ""
        for token in tokenizer.encode(text):
            detokenizer.append(token, may_stop=True)
            shown += detokenizer.take().text
        detokenizer.finish()
        assert shown + detokenizer.take().text == wanted


@given(st.lists(st.integers(0, 5), max_size=12))
def test_bytes_that_form_no_character_do_not_end_an_output(token_ids: list[int]) -> None:
    pieces = ["a", "b", "<0x0A>", "<0xC3>", "<0xA9>", "<0xFF>"]
    backend = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="a"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer, text = Detokenizer(SimpleNamespace(backend_tokenizer=backend), SamplingParams()), ""
    for token in token_ids:
        detokenizer.append(token, may_stop=True)
        text += detokenizer.take().text
    detokenizer.finish()
    text += detokenizer.take().text
    assert [letter for letter in text if letter in "ab"] == [pieces[index] for index in token_ids if index < 2]
