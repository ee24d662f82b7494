"""Messages in channels become reasoning, content and calls, however the text is split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.errors import ConfigError
from strandline.server.requests.output_parser import OutputFormat, OutputParser, choose_output_format
from strandline.text.channels import CHANNEL, MESSAGE, TAGS, ChannelParser
from tests.cpu.text.counted_text import CountedText

ANSWER = (
    "<|channel|>analysis<|message|>They ask for {rain}.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me "
    "see.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Rome"}<|call|>'
)
FINAL = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>"


def parse(text: str, *, takes_calls: bool = True, cuts: tuple[int, ...] = ()) -> OutputParser:
    parser, start = OutputParser(ChannelParser(takes_calls=takes_calls)), 0
    for cut in (*sorted(cut % (len(text) + 1) for cut in cuts), len(text)):
        parser.feed(text[start:cut])
        start = cut
    parser.finish()
    return parser


def test_each_channel_has_its_kind() -> None:
    parser = parse(ANSWER)
    assert (parser.reasoning, parser.content) == ("They ask for {rain}.", "Let me see.")
    assert [(call.name, call.arguments) for call in parser.calls] == [("weather", '{"city": "Rome"}')]
    parser = parse(FINAL)
    assert (parser.reasoning, parser.content, parser.calls) == ("Easy.", "It rains.", [])


def test_messages_of_one_kind_are_lines() -> None:
    parser = parse(ANSWER.removesuffix("<|call|>") + "<|end|><|start|>assistant" + FINAL)
    assert (parser.reasoning, parser.content) == ("They ask for {rain}.\nEasy.", "Let me see.\nIt rains.")


def test_recipient_may_come_before_the_channel() -> None:
    [call] = parse("<|start|>assistant to=functions.a.b<|channel|>commentary json<|message|>{}<|call|>").calls
    assert (call.name, call.arguments) == ("a.b", "{}")


@pytest.mark.parametrize("cut", range(9))
def test_answer_may_begin_with_the_recipient(cut: int) -> None:
    """The prompt ends with ``<|start|>assistant``, and so within a header."""
    parser = parse(' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>', cuts=(cut,))
    assert [(call.name, call.arguments) for call in parser.calls] == [("f", '{"x": 1}')]
    assert parser.content == ""


def test_calls_of_built_in_tools_are_reasoning() -> None:
    assert parse("<|channel|>analysis to=python code<|message|>1 + 1<|call|>").reasoning == "1 + 1"


def test_content_says_where_it_was_read() -> None:
    answer = ANSWER.removesuffix("<|call|>") + "<|end|><|start|>assistant" + FINAL
    parser = OutputParser(ChannelParser(takes_calls=False))
    segments = [*parser.feed(answer), *parser.finish()]
    read = [answer[start:end] for segment in segments for start, end in segment.spans]
    assert read == ["Let me see.", "weather", '{"city": "Rome"}', "It rains."]


def test_work_for_a_message_does_not_grow_with_their_number() -> None:
    works = []
    for num_messages in (50, 100):
        CountedText.take_count()
        OutputParser(ChannelParser(takes_calls=True)).feed(
            CountedText(f"{CHANNEL}final{MESSAGE}It rains.<|end|>" * num_messages)
        )
        works.append(CountedText.take_count())
    assert works[1] <= 2 * works[0]


def test_calls_are_content_where_there_are_no_tools() -> None:
    assert parse(ANSWER, takes_calls=False).content == 'Let me see.\nweather {"city": "Rome"}'


@pytest.mark.parametrize("text", ["plain <|x|>", "<|chan", " {}", "", " t", " to x"])
def test_text_without_a_header_is_content(text: str) -> None:
    assert parse(text).content == text


def test_endless_header_is_content() -> None:
    assert parse("<|channel|>" + 600 * "x").content.endswith("x" * 600)


PIECES = [*TAGS, "analysis", "final", " to=functions.f ", "{}", "<|", "assistant", " to="]


@given(st.lists(st.sampled_from(PIECES), max_size=20), st.lists(st.integers(0, 300), max_size=6))
def test_result_does_not_depend_on_chunks(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    whole, cut = parse(text), parse(text, cuts=tuple(cuts))
    found, expected = (
        (x.reasoning, x.content, [(call.name, call.arguments) for call in x.calls]) for x in (cut, whole)
    )
    assert found == expected


def test_parser_is_found_by_template_token_or_name() -> None:
    formats = [
        choose_output_format("auto", "auto", "{{ '<|channel|>final<|message|>' }}"),
        choose_output_format("auto", "auto", "", {"<|channel|>": 7}),
        choose_output_format("openai", "auto", ""),
        choose_output_format("none", "openai_gptoss", ""),
    ]
    assert {x.reasoning for x in formats} == {"openai_gptoss"}
    assert formats[0].tags(with_tools=False) == set(TAGS)
    assert not formats[0].opens_reasoning("<|start|>assistant")
    assert formats[0].reasoning_rules("", with_tools=True) is None
    assert choose_output_format("none", "none", "<|channel|>") == OutputFormat()
    with pytest.raises(ConfigError, match="--reasoning-parser must be one of"):
        choose_output_format("openai", "harmony", "")
