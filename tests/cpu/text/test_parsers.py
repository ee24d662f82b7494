"""Parsers of reasoning and tool calls: results do not depend on how the text is chunked."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.text.json_calls import parse_json
from strandline.text.reasoning import ThinkParser
from strandline.text.segments import Segment, SegmentKind, SegmentParser, content, joined, merge_segments, split_at_tag
from strandline.text.tool_formats import tool_format
from tests.cpu.text.counted_text import CountedText

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "maybe": {"type": ["string", "null"]},
        },
    }
}
PARSERS: dict[str, Callable[[], SegmentParser]] = {
    "think": lambda: ThinkParser(is_open=False),
    "think, opened": lambda: ThinkParser(is_open=True),
    "hermes": lambda: tool_format("hermes").parser(SCHEMAS),
    "qwen3_coder": lambda: tool_format("qwen3_coder").parser(SCHEMAS),
}
SHARDS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
    *("weather", ">", "city", "days", "\n", " ", '"', "\\", "{", "}", "a<b", "12"),
    '{"name": "weather", "arguments": {"city": "Ulm"}}',
    '{"arguments": "{}", "name": "weather"}',
]


def parse(name: str, *texts: str) -> list[Segment]:
    """Return segments, after a check that they say where content was read."""
    parser = PARSERS[name]()
    segments = [segment for text in texts for segment in parser.feed(text)]
    segments = merge_segments([*segments, *parser.finish()])
    spans = [span for segment in segments for span in segment.spans]
    assert "".join("".join(texts)[start:end] for start, end in spans) == contents(segments)
    return segments


def calls(segments: list[Segment]) -> list[tuple[str, Any]]:
    """Return the names and arguments of well-formed calls."""
    found = []
    for segment, after in zip(segments, [*segments[1:], Segment(SegmentKind.CONTENT, "")], strict=True):
        if segment.kind is SegmentKind.CALL:
            found.append((segment.text, json.loads(after.text) if after.kind is SegmentKind.ARGUMENTS else None))
    return found


def contents(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments if segment.kind is SegmentKind.CONTENT)


@settings(max_examples=4 * settings().max_examples)
@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(SHARDS), max_size=14), st.data())
def test_how_the_text_is_cut_changes_nothing(name: str, shards: list[str], data: st.DataObject) -> None:
    text = "".join(shards)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    whole = parse(name, text)
    assert parse(name, *parts) == whole
    assert parse(name, *text) == whole


@given(st.sampled_from(sorted(PARSERS)), st.text("ab <>/\n{}", max_size=60))
def test_text_without_whole_tags_is_kept(name: str, text: str) -> None:
    kept = "".join(segment.text for segment in parse(name, text))
    assert kept == (text.lstrip() if name == "think, opened" and text.strip() else text)


def test_reasoning_is_told_from_the_answer() -> None:
    expected = [Segment(SegmentKind.REASONING, "hm,\n\nso"), Segment(SegmentKind.CONTENT, "Yes.\n")]
    assert parse("think", "<think>\nhm,\n\nso\n</think>\n\nYes.\n") == expected
    assert parse("think, opened", "hm,\n\nso\n</think>\n\nYes.\n") == expected
    assert parse("think, opened", "<think>\nhm,\n\nso\n</think>\n\nYes.\n") == expected


@pytest.mark.parametrize("text", ["", "<think>", "<think>so", "<think>so</think>", "so"])
@pytest.mark.parametrize("name", ["think", "think, opened"])
@pytest.mark.parametrize("character", [" ", "x", "<"])
def test_work_for_a_token_of_reasoning_does_not_grow(name: str, text: str, character: str) -> None:
    parser = PARSERS[name]()
    parser.feed(text)
    CountedText.take_count()
    halves = []
    for _ in range(2):
        for _ in range(400):
            parser.feed(CountedText(character))
        halves.append(CountedText.take_count())
    assert halves[1] <= 2 * halves[0]


def test_unclosed_reasoning_is_reasoning_and_unopened_is_content() -> None:
    assert parse("think, opened", "still at it") == [Segment(SegmentKind.REASONING, "still at it")]
    assert parse("think", "  no </think> here") == [Segment(SegmentKind.CONTENT, "  no </think> here")]


def test_calls_in_json_are_found_among_content() -> None:
    text = (
        'Let me see.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "x": [1, "}"]}}\n</tool_call>\n'
        '<tool_call>{"name": "clock"}</tool_call>'
    )
    segments = parse("hermes", text)
    assert contents(segments) == "Let me see."
    assert calls(segments) == [("weather", {"city": "Ulm", "x": [1, "}"]}), ("clock", {})]


def test_the_name_comes_first_and_arguments_as_they_are_written() -> None:
    parser = PARSERS["hermes"]()
    assert parser.feed('<tool_call>{"name": "weather", "argu') == []
    begun = [Segment(SegmentKind.CALL, "weather"), Segment(SegmentKind.ARGUMENTS, '{"city": "U')]
    assert merge_segments(parser.feed('ments": {"city": "U')) == begun
    assert merge_segments(parser.feed('lm"}}')) == [Segment(SegmentKind.ARGUMENTS, 'lm"}')]
    parser = PARSERS["qwen3_coder"]()
    parser.feed("<tool_call>\n<function=weather>\n<parameter=city>\nUl")
    assert merge_segments(parser.feed("m und Neu")) == [Segment(SegmentKind.ARGUMENTS, "m und Neu")]


@pytest.mark.parametrize(
    "written",
    [
        '{"arguments": {"city": "Ulm"}, "name": "weather"}',
        '{"name": "weather", "arguments": "{\\"city\\": \\"Ulm\\"}"}',
        '{"name": "weather", "parameters": {"city": "Ulm"}}',
        ' {"id": 7, "ok": true, "name" : "weather" , "arguments" : {"city": "Ulm"} } ',
    ],
)
def test_other_ways_of_writing_json_are_understood(written: str) -> None:
    assert calls(parse("hermes", f"<tool_call>{written}</tool_call>")) == [("weather", {"city": "Ulm"})]


@pytest.mark.parametrize("wrong", ["", "not json", '{"name": 3}', "[]", '{"name"', '{name: "weather"}', '{"a": {}}'])
def test_what_is_no_call_is_content(wrong: str) -> None:
    text = f"<tool_call>{wrong}</tool_call>"
    assert parse("hermes", text) == [Segment(SegmentKind.CONTENT, text)]
    if not wrong.startswith("<function="):
        assert parse("qwen3_coder", text) == [Segment(SegmentKind.CONTENT, text)]


def test_calls_in_tags_are_typed_by_their_schema() -> None:
    text = (
        'Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\n"York"\n</parameter>\n<parameter=days>\n3\n'
        '</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=where>\n{"x": [1]}\n</parameter>\n'
        "<parameter=maybe>\nnull\n</parameter>\n<parameter=other>\n12\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
    )
    segments = parse("qwen3_coder", text)
    weather = {"city": 'New\n"York"', "days": 3, "exact": True, "where": {"x": [1]}, "maybe": None, "other": "12"}
    assert calls(segments) == [("weather", weather), ("clock", {})]
    assert contents(segments) == "Sure."


def test_tags_that_a_model_forgot_are_put_up_with() -> None:
    text = "<function=weather>\n<parameter=city>\nUlm\n<parameter=days>\n3\n</function>\nDone."
    segments = parse("qwen3_coder", text)
    assert calls(segments) == [("weather", {"city": "Ulm", "days": 3})]
    assert contents(segments) == "Done."


def test_a_value_may_hold_the_tag_that_ends_a_call() -> None:
    text = "<tool_call><function=f><parameter=a>\nx</tool_call>y\n</parameter></function></tool_call>"
    assert calls(parse("qwen3_coder", text)) == [("f", {"a": "x</tool_call>y"})]


def test_values_that_are_not_what_the_schema_says_stay_strings() -> None:
    text = "<tool_call><function=weather><parameter=days>soon</parameter><parameter=where>{'a'</parameter></function>"
    assert calls(parse("qwen3_coder", text)) == [("weather", {"days": "soon", "where": "{'a'"})]


@pytest.mark.parametrize("number", ["1e999", "-1e999", "[1e999]", '{"a": -1e999}', "NaN", "Infinity"])
def test_numbers_that_json_cannot_hold_stay_text(number: str) -> None:
    assert parse_json(number) is None
    key = "where" if number.startswith("{") else "days"
    text = f"<tool_call><function=weather><parameter={key}>{number}</parameter></function></tool_call>"
    assert calls(parse("qwen3_coder", text)) == [("weather", {key: number})]


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    assert parse("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b')[-1] == Segment(
        SegmentKind.ARGUMENTS, '{"a": "b'
    )
    assert parse("qwen3_coder", "<tool_call><function=f><parameter=a>b")[-1] == Segment(
        SegmentKind.ARGUMENTS, '{"a": "b'
    )


def test_text_is_split_at_first_tag_and_partial_tag_held() -> None:
    assert split_at_tag("ab<y>c<x>", ("<x>", "<y>")) == ("ab", "<y>", "c<x>")
    assert split_at_tag("ab<", ("<x>",)) == ("ab", None, "<")


def test_part_of_content_says_where_it_was_read() -> None:
    whole = joined([content("abc", 3), content("d", 4), content("ef", 9)])
    assert whole.spans == ((0, 4), (7, 9))
    for start, end, spans in ((1, 5, ((1, 4), (7, 8))), (4, 6, ((7, 9),)), (2, 2, ())):
        part = whole.part(start, end)
        assert (part.text, part.spans) == ("abcdef"[start:end], spans)


TYPED: dict[str, Any] = {
    "type": "object",
    "$defs": {"unit": {"enum": ["c", "1"]}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}] * 2}},
    "properties": {
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "listed": {"type": ["string", "null", "array"]},
        "unit": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
        "wrapped": {"allOf": [{"$ref": "#/$defs/unit"}]},
        "level": {"oneOf": [{"type": "integer"}, {"const": "high"}]},
        "tags": {"type": "array"},
        "flag": {"type": ["boolean", "string"]},
        "loop": {"$ref": "#/$defs/loop"},
        "lost": {"$ref": "#/$defs/none"},
    },
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        *(("name", "12", "12"), ("name", "true", "true"), ("name", "[1]", "[1]"), ("name", "Ulm", "Ulm")),
        *(("name", "None", None), ("name", "null", None), ("count", "None", None), ("count", "3", 3)),
        *(("listed", "[1]", [1]), ("listed", '{"a": 1}', '{"a": 1}'), ("listed", "1", "1")),
        *(
            ("unit", "1", "1"),
            ("unit", "None", None),
            ("wrapped", "1", "1"),
            ("level", "3", 3),
            ("level", "high", "high"),
        ),
        *(("tags", "['a', \"it's\", True, None]", ["a", "it's", True, None]), ("tags", "['a', b]", "['a', b]")),
        *(("flag", "False", False), ("flag", "1", "1"), ("loop", "1", 1), ("lost", "x", "x")),
    ],
)
def test_values_in_tags_have_the_types_of_their_schema(key: str, text: str, value: Any) -> None:
    call = f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    parser = tool_format("qwen3_coder").parser({"f": TYPED})
    assert calls(merge_segments(parser.feed(call))) == [("f", {key: value})]
