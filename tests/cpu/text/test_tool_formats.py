"""Formats of tool calls: each is detected from a template, parses its models' calls, and accepts what its grammar does.

Templates are shortened to the lines that tell a format.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline import StructuredOutputsParams
from strandline.errors import ConfigError, RequestError
from strandline.server.requests.output_parser import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    OutputParser,
    chat_message,
    choose_output_format,
)
from strandline.text.segments import Segment, SegmentKind, merge_segments
from strandline.text.structured import Grammars
from strandline.text.tool_formats import ALIASES, TOOL_FORMATS, tool_format
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.text.calls_grammar import calls_grammar
from tests.cpu.text.counted_text import CountedText

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["days"],
}
SCHEMAS: dict[str, Any] = {"weather": PARAMETERS, "clock": {"type": "object", "properties": {}}}
WANTED = [("weather", {"city": 'Ulm, "x"', "days": 2, "exact": True, "tags": ["a", "b"]}), ("clock", {})]
JSON_CALLS = (
    '{"name": "weather", "arguments": {"city": "Ulm, \\"x\\"", "days": 2, "exact": true, "tags": ["a", "b"]}}',
    '{"name": "clock", "arguments": {}}',
)
PYTHON_CALL = """weather(city='Ulm, "x"', days=2, exact=True, tags=["a", 'b'])"""
TAGGED = 'Ulm, "x"', "2", "true", '["a", "b"]'
PARAMETER_NAMES = ("city", "days", "exact", "tags")


def in_tags(function: str, parameter: str, ends: tuple[str, str], around: str) -> str:
    values = zip(PARAMETER_NAMES, TAGGED, strict=True)
    lines = [parameter.format(name) + around + value + around + ends[0] for name, value in values]
    return "\n".join([function.format("weather"), *lines, ends[1]]) + "\n" + function.format("clock") + "\n" + ends[1]


ANSWERS = {
    "hermes": f"<tool_call>\n{JSON_CALLS[0]}\n</tool_call>\n<tool_call>\n{JSON_CALLS[1]}\n</tool_call>",
    "jamba": f"<tool_calls>[\n  {JSON_CALLS[0]},\n  {JSON_CALLS[1]}\n]</tool_calls>",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Ulm, \\"x\\"", "days": 2, "exact": true, "tags": ["a", "b"]}<|tool_call_end|>'
        "<|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "lfm2": f"<|tool_call_start|>[{PYTHON_CALL}, clock()]<|tool_call_end|>",
    "llama3_json": f"<|python_tag|>{'; '.join(JSON_CALLS)}".replace("arguments", "parameters"),
    "minimax": "<tool_calls>\n" + "\n".join(JSON_CALLS) + "\n</tool_calls>",
    "minimax_m2": "<minimax:tool_call>\n"
    + in_tags('<invoke name="{}">', '<parameter name="{}">', ("</parameter>", "</invoke>"), "")
    + "\n</minimax:tool_call>",
    "nemotron_json": f"<TOOLCALL>[{', '.join(JSON_CALLS)}]</TOOLCALL>",
    "olmo3": f"<function_calls>\n{PYTHON_CALL}\nclock()\n</function_calls>",
    "qwen3_coder": "<tool_call>\n"
    + in_tags("<function={}>", "<parameter={}>", ("</parameter>", "</function>"), "\n")
    + "\n</tool_call>",
}
JSON_TAGS = {"hermes": "tool_call", "jamba": "tool_calls", "minimax": "tool_calls", "nemotron_json": "TOOLCALL"}
SIGNS = {
    "hermes": "{{ '<tool_call>\\n' + call | tojson + '\\n</tool_call>' }}",
    "jamba": "{{ '<|bom|><|assistant|> ' }}{{ '<tool_calls>[' }}",
    "kimi_k2": "<|tool_calls_section_begin|>{% for call in message.tool_calls %}<|tool_call_begin|>{{ call.id }}",
    "lfm2": "{{ 'List of tools: <|tool_list_start|>[' }}",
    "llama3_json": """{{- 'Respond in the format {"name": function name, "parameters": dictionary of' }}""",
    "minimax": "system tool_setting=tools\nrespond with <tool_calls></tool_calls> XML tags",
    "minimax_m2": "{% set begin = '<minimax:tool_call>' %}{{ '<invoke name=\"' + call.name + '\">' }}",
    "nemotron_json": "<AVAILABLE_TOOLS>{{ tools }}</AVAILABLE_TOOLS> {{ '<TOOLCALL>[' }}",
    "olmo3": "Output any calls within <function_calls></function_calls> tags",
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}",
}
OTHER_SHARDS = (
    '"',
    "'",
    "\\",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    "=",
    ":",
    "weather",
    "city",
    " ",
    "\n",
    "<",
    "x",
    "é",
)


def parse(name: str, *texts: str) -> list[Segment]:
    """Return segments, after a check that they say where content was read."""
    parser = tool_format(name).parser(SCHEMAS)
    segments = [segment for text in texts for segment in parser.feed(text)]
    segments = merge_segments([*segments, *parser.finish()])
    assert read_from("".join(texts), segments) == contents(segments)
    return segments


def calls(segments: list[Segment]) -> list[tuple[str, Any]]:
    found: list[tuple[str, str]] = []
    for segment in segments:
        kind, text = segment.kind, segment.text
        if kind is SegmentKind.CALL:
            found.append((text, ""))
        elif kind is SegmentKind.ARGUMENTS:
            found[-1] = (found[-1][0], found[-1][1] + text)
    return [(name, json.loads(text)) for name, text in found]


def contents(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments if segment.kind is SegmentKind.CONTENT)


def read_from(text: str, segments: list[Segment]) -> str:
    """Return the characters of a text that content was read from."""
    spans = [span for segment in segments for span in segment.spans]
    assert spans == sorted(spans)
    return "".join(text[start:end] for start, end in spans)


def test_every_format_has_an_example() -> None:
    assert ANSWERS.keys() == SIGNS.keys() == TOOL_FORMATS.keys()


def test_page_shows_every_parser_and_calls_of_its_format() -> None:
    page = (Path(__file__).parents[3] / "docs" / "server.md").read_text().replace("\\|", "\x00")
    rows = [row.replace("\x00", "|") for row in page.splitlines() if row.startswith("| `")]
    shown = {
        name: row for row in rows[::-1] for name in re.findall(r"`(\w+)`", row.replace("|", "\n", 1).split(" | ")[0])
    }
    assert {*TOOL_CALL_PARSERS, *REASONING_PARSERS} - {"auto", "none"} <= shown.keys()
    for name in sorted(TOOL_FORMATS.keys() - {"minimax"}):
        example = re.findall(r"`([^`]*)`", shown[name])[-1]
        [(function, arguments)] = calls(tool_format(name).parser({"f": {}}).feed(example))
        assert (function, int(arguments["x"])) == ("f", 1)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_calls_are_found_among_content(name: str) -> None:
    segments = parse(name, f"Let me see.\n{ANSWERS[name]}\nDone.")
    assert calls(segments) == WANTED
    assert contents(segments) == "Let me see.Done."


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_template_tells_the_format(name: str) -> None:
    assert choose_output_format("auto", "none", SIGNS[name]).tool_calls == name


def test_token_tells_the_format_that_a_template_leaves_out() -> None:
    plain = "List of tools: [{{ tools }}]"
    assert choose_output_format("auto", "none", plain, {"<|tool_call_start|>": 8, "<|im_end|>": 9}).tool_calls == "lfm2"
    assert choose_output_format("auto", "none", SIGNS["olmo3"], {"<|tool_call_start|>": 8}).tool_calls == "olmo3"
    assert choose_output_format("auto", "none", plain, {"<|im_end|>": 9}).tool_calls == "none"


@pytest.mark.parametrize("shown", ["<think>\n", "{{ content.split('</think>')[-1] }}"])
def test_template_that_renders_or_strips_thinking_tells_the_reasoning(shown: str) -> None:
    assert choose_output_format("none", "auto", shown).reasoning == "qwen3"
    assert choose_output_format("none", "auto", "plain").reasoning == "none"


def test_names_of_vllm_are_understood_and_others_are_refused() -> None:
    for name in ALIASES:
        assert choose_output_format(name, "olmo3", "").parser("", SCHEMAS) is not None
    with pytest.raises(ConfigError, match="--tool-call-parser must be one of auto, granite4, hermes, jamba, kimi_k2"):
        choose_output_format("kimi", "none", "")


@settings(max_examples=4 * settings().max_examples)
@given(st.sampled_from(sorted(TOOL_FORMATS)), st.data())
def test_how_an_answer_is_cut_changes_nothing(name: str, data: st.DataObject) -> None:
    answer, tags = ANSWERS[name], tool_format(name).tags
    long = (answer[:-1], answer[7:], *JSON_CALLS, PYTHON_CALL)
    shards = data.draw(st.lists(st.sampled_from([*long, *OTHER_SHARDS, *tags]), max_size=14))
    text = "".join(shards)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    whole = parse(name, text)
    assert parse(name, *parts) == whole
    assert parse(name, *text) == whole
    if not any(segment.kind is SegmentKind.CALL for segment in whole):
        assert contents(whole).replace(" ", "").replace("\n", "") == text.replace(" ", "").replace("\n", "")


@settings(max_examples=4 * settings().max_examples)
@given(st.sampled_from(sorted(TOOL_FORMATS)), st.data())
def test_no_word_of_a_text_is_lost(name: str, data: st.DataObject) -> None:
    answer = ANSWERS[name]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    tags = st.sampled_from(("", "", *tool_format(name).tags))
    text = "".join(f"{piece}{data.draw(tags)} word{index} " for index, piece in enumerate(pieces))
    found = "".join(f"{segment.text} {segment.call_id or ''} " for segment in parse(name, text))
    for index in range(len(pieces)):
        assert f"word{index}" in found


@pytest.mark.parametrize("name", ["llama3_json", *sorted(JSON_TAGS)])
@pytest.mark.parametrize("text", ['{"x": {\\"', '{"x": {"', '{"x": "', '{"', "{", '{"name": "', '{"x": {'])
@pytest.mark.parametrize("end", ["", '"}}', "}" * 200, '"' + "}" * 200])
def test_work_for_json_that_is_no_call_is_linear(name: str, text: str, end: str) -> None:
    known, works = tool_format(name), []
    block = "".join([known.openers[0], text, *known.other_tags])
    for num_blocks in (50, 100):
        CountedText.take_count()
        parser = known.parser(SCHEMAS)
        for start in range(0, len(whole := block * num_blocks + end), 5):
            parser.feed(CountedText(whole[start : start + 5]))
        parser.finish()
        works.append(CountedText.take_count())
    assert works[1] <= 2.5 * works[0]


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_every_beginning_of_an_answer_can_be_a_message(name: str) -> None:
    for end in range(len(ANSWERS[name])):
        parser = OutputParser(None, tool_format(name).parser(SCHEMAS))
        parser.feed(ANSWERS[name][:end])
        parser.finish()
        json.dumps(chat_message(parser, ())).encode()


CLOCK = ("clock", {})
NO_JSON_CALL = (
    '{"name": "clock", arguments: {"days": 2}}',
    '{"name": "clock", "arguments": Ulm}',
    '{"name": "clock", "arguments": 1e999}',
    '{"name": "clock", "arguments": "\\ud800"}',
    '{"name": "clock", "arguments":}',
    '{"name": "clock"',
    '{"name": "clock}',
    '{"name": "", "arguments": {}}',
    '{"arguments": {"days": Ulm}, "name": "clock"}',
    '{"id": \\, "name": "clock"}',
    '{"arguments": {}}, {"name": "clock"}',
    '[{"arguments": {}}',
    '{"name": "clock", "args": {"days": 2}}',
    '{"name": "clock", "days": 2}',
    '{"<tool_call>',
    '{"name": "\\ud800"}',
    "{'name': 'clock'}",
    "[]",
    "[clock]",
    "[{]",
)
"""Texts between two tags that stay as they are."""


@pytest.mark.parametrize("name", sorted(JSON_TAGS))
@pytest.mark.parametrize(
    ("text", "wanted", "kept"),
    [
        ('{"name": "clock", "arguments": {}} so', [CLOCK], " so</TAG>"),
        ('{"name": "clock", "arguments": {}}, {"x"]', [CLOCK], ', {"x"]</TAG>'),
        ('{"name": "clock"}\n{"name": "clock", x}', [CLOCK], '\n{"name": "clock", x}</TAG>'),
        ('{"name": "clock", "arguments": {}, so', [CLOCK], ", so</TAG>"),
        ('{"name": "clock", "arguments": {}}}', [CLOCK], "}</TAG>"),
        ('[{"name": "clock", "arguments": {}, ]', [CLOCK], ", ]</TAG>"),
        ('{"name": "clock", "arguments": {}', [CLOCK], ""),
        ('{"name": "clock", "arguments": null}', [CLOCK], ""),
        ('{"type": "function", "id": 7, "name": "clock"}', [CLOCK], ""),
        ('{"id": [{"x": "}"}], "name": "clock", "arguments": ""}', [CLOCK], ""),
    ],
)
def test_what_is_no_json_behind_a_call_stays(name: str, text: str, wanted: list[Any], kept: str) -> None:
    segments = parse(name, f"<{JSON_TAGS[name]}>{text}</{JSON_TAGS[name]}>")
    assert calls(segments) == wanted
    assert contents(segments) == kept.replace("TAG", JSON_TAGS[name])


@pytest.mark.parametrize("name", sorted(JSON_TAGS))
@pytest.mark.parametrize(
    "written",
    [
        '{"name": "weather", "arguments": ARGUMENTS}',
        '{"arguments": ARGUMENTS, "name": "weather"}',
        '{"name": "weather", "arguments": STRING}',
        '{"id": "</TAG>", "</TAG>": 1, "name": "weather", "arguments": ARGUMENTS}',
    ],
)
def test_closing_tag_in_a_string_ends_no_json_call(name: str, written: str) -> None:
    tag = JSON_TAGS[name]
    arguments = {"city": f'</{tag}>"</{tag}>', f"</{tag}>": 1, "escaped": "\\"}
    as_json = json.dumps(arguments)
    text = written.replace("ARGUMENTS", as_json).replace("STRING", json.dumps(as_json)).replace("TAG", tag)
    segments = parse(name, *f"<{tag}>{text}</{tag}> Done.")
    assert calls(segments) == [("weather", arguments)]
    assert contents(segments) == "Done."


@pytest.mark.parametrize("name", sorted(JSON_TAGS))
@pytest.mark.parametrize("text", [*NO_JSON_CALL, '{"name": "clock", "arguments"', '{"name": "clock"}<'])
def test_json_that_is_cut_off_before_its_arguments_stays(name: str, text: str) -> None:
    segments = parse(name, f"<{JSON_TAGS[name]}>{text}")
    whole = CLOCK in calls(segments)
    assert whole is text.endswith("}<")
    assert contents(segments) == ("<" if whole else f"<{JSON_TAGS[name]}>{text}")


MALFORMED = {
    **{name: tuple(f"<{tag}>{wrong}</{tag}>" for wrong in NO_JSON_CALL) for name, tag in JSON_TAGS.items()},
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|>weather<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>weather<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_call_begin|>two words<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    "lfm2": tuple(
        f"<|tool_call_start|>{wrong}<|tool_call_end|>"
        for wrong in (
            *("", "[]", "[weather]", "[weather(]", "[weather(days=)]", "[weather(days=2]", "[1 + 1]", "(weather())"),
            *("[weather(days=f(2))]", "[weather(days=2, **{})]", "[weather(days=1e999)]", "[weather(days=1j)]"),
            *("[weather(city=b'x')]", "[weather(city='\\ud800')]", "[weather(city=f'x')]", "[unknown(1)]"),
            *(f"[weather(days={'(' * 300}{')' * 300})]", "[weather(city=Ulm)]", "[weather(city='a' < 'b')]"),
        )
    ),
    "llama3_json": (
        *('<|python_tag|>weather.call(city="Ulm")', '<|python_tag|>{"name": "other", "parameters": {}}'),
        *('<|python_tag|>{"name": "clock", "parameters": Ulm}', '<|python_tag|>{"name": "clock}', "<|python_tag|>"),
        *('{"city": "Ulm"}', '{"name": "Ada"}', "{name: clock}", 'So: {"name": "clock", "parameters": {}}', "{"),
    ),
    "minimax_m2": ("<minimax:tool_call>weather</minimax:tool_call>",),
    "olmo3": ("<function_calls>\nweather: Ulm\n</function_calls>", "<function_calls></function_calls>"),
    "qwen3_coder": ("<tool_call>weather</tool_call>",),
}


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_malformed_call_stays_text_and_hides_none_behind(name: str) -> None:
    for wrong in MALFORMED[name]:
        assert parse(name, wrong) == [Segment(SegmentKind.CONTENT, wrong)]
        assert calls(parse(name, wrong + ANSWERS[name])) == WANTED


MINIMAX_TAGS = {
    "tool_call>": "minimax:tool_call>",
    "<function=": "<invoke name=",
    "</function>": "</invoke>",
    "<parameter=": "<parameter name=",
}


def in_tags_of(name: str, text: str) -> str:
    """Return a text in Qwen's tags in those of a format."""
    for qwen, minimax in MINIMAX_TAGS.items() if name == "minimax_m2" else ():
        text = text.replace(qwen, minimax)
    return text


WEATHER = "<tool_call><function=weather><parameter=days>2</parameter>"


@pytest.mark.parametrize("name", ["minimax_m2", "qwen3_coder"])
@pytest.mark.parametrize(
    ("text", "wanted", "kept"),
    [
        ("<tool_call><function=clock>so</function></tool_call>", [], ...),
        ("<tool_call><function=wea\n<parameter=days>2</parameter></function></tool_call>", [], ...),
        ("<tool_call><function=" + "x" * 300 + "></function></tool_call>", [], ...),
        ("<function=clock>so</function>", [], ...),
        (
            "<tool_call><function=weather> so <parameter=days>2</parameter></function>",
            [("weather", {"days": 2})],
            " so ",
        ),
        (WEATHER + "so</function></tool_call>", [("weather", {"days": 2})], "so"),
        (WEATHER + "<parameter=city Ulm</parameter></function>", ..., "<parameter=city Ulm</parameter>"),
        (WEATHER + "<parameter=" + "x" * 300 + "></function>", ..., "<parameter=" + "x" * 300 + ">"),
        (WEATHER + "\n<function=clock>\n</function>", [("weather", {"days": 2}), CLOCK], ""),
        (WEATHER + "</function><function=clock\n></function>", [("weather", {"days": 2}), CLOCK], ""),
        (WEATHER + "</function>\n<function=clock>so</function>", ..., "<function=clock>so</function>"),
        (WEATHER + "</function>so</tool_call>", ..., "so</tool_call>"),
        (
            "Write <function=name here. <tool_call><function=clock></function></tool_call>",
            [CLOCK],
            "Write<function=name here.",
        ),
    ],
)
def test_what_is_no_call_in_tags_stays(name: str, text: str, wanted: Any, kept: Any) -> None:
    segments = parse(name, in_tags_of(name, text))
    assert calls(segments) == ([("weather", {"days": 2})] if wanted is ... else wanted)
    assert contents(segments) == in_tags_of(name, text if kept is ... else kept)


@pytest.mark.parametrize("name", ["minimax_m2", "qwen3_coder"])
@pytest.mark.parametrize(
    ("text", "arguments", "kept"),
    [
        ("<tool_call><function=weather>", None, ...),
        ("<tool_call>\n<function=weather>\n<param", None, ...),
        ("<tool_call>\n<function=weather>so", None, ...),
        ("<function=weather><parameter=da", None, ...),
        ("<function=weat", None, ...),
        (WEATHER, '{"days": 2}', ""),
        (WEATHER + "so", '{"days": 2}', "so"),
        (WEATHER + "\n<param", '{"days": 2', "\n<param"),
        (WEATHER + "\n<parameter=ci", '{"days": 2', "\n<parameter=ci"),
        (WEATHER + "<parameter=tags>[1, ", '{"days": 2, "tags": [1, ', ""),
        (WEATHER + "so<parameter=city>U</par", '{"days": 2, "city": "U</par', "so"),
        (WEATHER + "</function></tool_c", '{"days": 2}', "</tool_c"),
        (WEATHER + "</function><function=clo", '{"days": 2}', "<function=clo"),
    ],
)
def test_call_in_tags_that_is_cut_off_loses_nothing(name: str, text: str, arguments: str | None, kept: Any) -> None:
    segments = parse(name, in_tags_of(name, text))
    assert [segment.text for segment in segments if segment.kind is SegmentKind.ARGUMENTS] == (
        [arguments] if arguments else []
    )
    assert contents(segments) == in_tags_of(name, text if kept is ... else kept)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_work_for_a_token_does_not_grow(name: str) -> None:
    answer = ANSWERS[name]
    for end in range(0, len(answer), 11):
        for character in " x<[\n":
            parser = tool_format(name).parser(SCHEMAS)
            parser.feed(answer[:end])
            CountedText.take_count()
            halves = []
            for _ in range(2):
                for _ in range(400):
                    parser.feed(CountedText(character))
                halves.append(CountedText.take_count())
            assert halves[1] <= 2 * halves[0], (answer[:end], character)


@pytest.mark.parametrize(
    ("text", "wanted", "kept"),
    [
        ('\n {"name": "clock", "parameters": {}}\nDone.', [CLOCK], "Done."),
        ('{"type": "function", "name": "weather", "arguments": {"days": 2}} ; so', [("weather", {"days": 2})], "; so"),
        ('{"name": "clock"}; {"name": "other", "parameters": {}}', [CLOCK], '; {"name": "other", "parameters": {}}'),
        ('{"name": "clock"};\n{"name": "clock"}\n', [CLOCK, CLOCK], ""),
        ('{"name": "clock"}; {"name": "clo', [CLOCK], '; {"name": "clo'),
        ('{"name": "weather", "parameters": {"city": "a; {\\"}"}}', [("weather", {"city": 'a; {"}'})], ""),
        ('Call {"name": "clock", "parameters": {}}', [], ...),
        ('{"name": "Ada", "parameters": {}}\n{"name": "clock"} ', [], ...),
    ],
)
def test_calls_without_tags_begin_an_answer(text: str, wanted: Any, kept: Any) -> None:
    segments = parse("llama3_json", text)
    assert calls(segments) == wanted
    assert contents(segments) == (text if kept is ... else kept)


def test_section_that_is_cut_off_before_its_arguments_stays() -> None:
    head = "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>"
    assert parse("kimi_k2", head + " ") == [Segment(SegmentKind.CONTENT, head + " ")]
    assert calls(parse("kimi_k2", head + " <|tool_call_end|>")) == [CLOCK]


def test_calls_before_a_malformed_one_are_kept() -> None:
    segments = parse("lfm2", "<|tool_call_start|>[clock(), weather(days=)]<|tool_call_end|>")
    assert calls(segments) == [("clock", {})]
    assert contents(segments) == ", weather(days=)]<|tool_call_end|>"
    kimi = ANSWERS["kimi_k2"].replace("functions.clock:1", "the clock")
    assert calls(parse("kimi_k2", kimi)) == WANTED[:1]


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("weather('Ulm', 2)", {"city": "Ulm", "days": 2}),
        (
            "get-weather.now(from='a', class=null, x=-1.5, y=(1, 2),)",
            {"from": "a", "class": None, "x": -1.5, "y": [1, 2]},
        ),
        ('weather(city="""a "b" c""", days=True)', {"city": 'a "b" c', "days": True}),
        ("weather(city='a\nb\\n\\d')", {"city": "a\nb\n\\d"}),
        ("weather(city='<|tool_call_end|>')", {"city": "<|tool_call_end|>"}),
        ("weather(city='it\\'s', days={'a': [1, {'b': None}]})", {"city": "it's", "days": {"a": [1, {"b": None}]}}),
        ('weather(city="\\ud83d\\ude00")', {"city": "😀"}),
        ("weather(city='\\ud83d\\ude00')", {"city": "😀"}),
        ("weather (\n  city = '',\n  days = 1\n)", {"city": "", "days": 1}),
    ],
)
def test_other_ways_of_writing_python_are_understood(written: str, wanted: Any) -> None:
    [(_, arguments)] = calls(parse("lfm2", f"<|tool_call_start|>[{written}]<|tool_call_end|>"))
    assert arguments == wanted


def test_ids_that_a_model_writes_are_those_of_its_calls() -> None:
    parser = OutputParser(None, tool_format("kimi_k2").parser(SCHEMAS))
    parser.feed(ANSWERS["kimi_k2"])
    parser.finish()
    assert [call["id"] for call in chat_message(parser, ())["tool_calls"]] == [
        "functions.weather:0",
        "functions.clock:1",
    ]


def test_kimi_arguments_are_streamed() -> None:
    parser = tool_format("kimi_k2").parser(SCHEMAS)
    head = "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    assert parser.feed(head) == []
    call = Segment(SegmentKind.CALL, "weather", "functions.weather:0")
    assert merge_segments(parser.feed('{"city": "U')) == [call, Segment(SegmentKind.ARGUMENTS, '{"city": "U')]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: (byte_tokenizer(), frozenset({0})), 256)


@pytest.mark.parametrize("name", sorted({*TOOL_FORMATS, *ALIASES}))
def test_grammar_takes_what_the_parser_parses(name: str, grammars: Grammars) -> None:
    tools = [{"type": "function", "function": {"name": key, "parameters": value}} for key, value in SCHEMAS.items()]
    grammar = calls_grammar(tools, "required", name, json.dumps)
    start = grammars.compile(StructuredOutputsParams(grammar=grammar)).start
    format_name = ALIASES.get(name, name)
    answers = {
        "jamba": f"<tool_calls>[{', '.join(JSON_CALLS)}]</tool_calls>",
        "llama3_json": ANSWERS["llama3_json"].removeprefix("<|python_tag|>"),
        "lfm2": ANSWERS["lfm2"].replace("""'Ulm, "x"'""", '"Ulm, \\"x\\""').replace("'b'", '"b"'),
        "olmo3": "<function_calls>"
        + PYTHON_CALL.replace("""'Ulm, "x"'""", '"Ulm, \\"x\\""').replace("'b'", '"b"')
        + "\nclock()</function_calls>",
        "qwen3_coder": ANSWERS["qwen3_coder"].replace(
            "\n<function=clock>", "\n</tool_call>\n<tool_call>\n<function=clock>"
        ),
    }
    answer = answers.get(format_name, ANSWERS[format_name])
    assert calls(parse(name, answer)) == WANTED
    tokens = byte_tokenizer().encode(answer)
    assert start.deep_copy().validate_tokens(tokens) == len(tokens)
    for wrong in (answer.replace('"Ulm', "Ulm").replace("days", "hours"), f"Sure. {answer}"):
        tokens = byte_tokenizer().encode(wrong)
        assert start.deep_copy().validate_tokens(tokens) < len(tokens)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_written_calls_are_parsed_and_taken_by_the_grammar(name: str, grammars: Grammars) -> None:
    ids = ("functions.weather:0", "functions.clock:1")
    functions = ({"name": key, "arguments": arguments} for key, arguments in WANTED)
    answer = tool_format(name).write([{"id": id, "function": each} for id, each in zip(ids, functions, strict=True)])
    assert calls(parse(name, answer)) == WANTED
    tools = [{"type": "function", "function": {"name": key, "parameters": value}} for key, value in SCHEMAS.items()]
    grammar = calls_grammar(tools, "required", name, json.dumps)
    start = grammars.compile(StructuredOutputsParams(grammar=grammar)).start
    tokens = byte_tokenizer().encode(answer)
    assert start.validate_tokens(tokens) == len(tokens)
    with pytest.raises(RequestError, match="arguments of a call of clock are not a JSON object"):
        tool_format(name).write([{"id": "x", "function": {"name": "clock", "arguments": "[1]"}}])


@pytest.mark.parametrize(
    ("arguments", "is_allowed"),
    [
        *(
            ("days=1", True),
            ("", False),
            ('city="x"', False),
            ('city="x", days=1', True),
            ("days=1, exact=False", True),
        ),
        *(('days=1, tags=["a", "b"]', True), ('days=1, city="x"', False), ("days=1, ", False), ("days='1'", False)),
    ],
)
def test_optional_arguments_of_python_calls_may_be_left_out(
    arguments: str, is_allowed: bool, grammars: Grammars
) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    grammar = calls_grammar(tools, "required", "olmo3", json.dumps)
    start = grammars.compile(StructuredOutputsParams(grammar=grammar)).start
    tokens = byte_tokenizer().encode(f"<function_calls>weather({arguments})</function_calls>")
    assert (start.deep_copy().validate_tokens(tokens) == len(tokens)) is is_allowed


@pytest.mark.parametrize("name", ["lfm2", "olmo3"])
@pytest.mark.parametrize(
    ("written", "city"),
    [
        *(("'it's'", "it's"), ("'it's the dog's'", "it's the dog's"), ("""'the "x" of'""", 'the "x" of')),
        *(('"the "x" of"', 'the "x" of'), ("'rock 'n' roll'", "rock 'n' roll"), ("'it\\'s O'Neil'", "it's O'Neil")),
        *(("'a' 'b'", "ab"), ("'Ulm' ", "Ulm"), ("''", "")),
    ],
)
def test_quotes_inside_strings_may_lack_a_backslash(name: str, written: str, city: str) -> None:
    known = tool_format(name)
    [opener, *_], [close, *_] = known.openers, known.other_tags
    text = f"{opener}[weather(city={written}, tags=['it's', {written}], days=2)]{close} Done."
    segments = parse(name, *text)
    assert calls(segments) == [("weather", {"city": city, "tags": ["it's", city], "days": 2})]
    assert contents(segments) == "Done."


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_function_without_parameters_may_be_called_with_any(name: str, grammars: Grammars) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    grammar = calls_grammar(tools, {"type": "function", "function": {"name": "clock"}}, name, json.dumps)
    assert grammar is not None
    assert grammars.compile(StructuredOutputsParams(grammar=grammar)).start is not None


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"required": 5}, "required"),
        ({"required": "days"}, "required"),
        ({"required": ["days", []]}, "required"),
        ({"properties": 5}, "properties"),
        ({"properties": [["days", {}]]}, "properties"),
        ({"properties": {"days": 5}}, "'days'"),
        ({"properties": {"days": {"type": 5}}}, "'days'"),
        ({"properties": {"days": {"type": ["string", {"type": "integer"}]}}}, "'days'"),
    ],
    ids=str,
)
def test_parameters_that_are_no_schema_are_refused(name: str, parameters: dict[str, Any], message: str) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    with pytest.raises(RequestError, match=f"parameters of tool 'weather'.*{message}"):
        calls_grammar(tools, "required", name, json.dumps)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_unusual_schemas_of_parameters_are_taken(name: str) -> None:
    unusual = {"any": True, "maybe": {"type": ["string", "null"]}, "no_type": {}}
    for parameters in (None, {"properties": None, "required": None}, {"properties": unusual, "required": ["x"]}):
        tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
        assert calls_grammar(tools, "required", name, json.dumps)


def written_call(name: str, function: str, parameter: str) -> str:
    """Return a call with the argument 1, as the format's templates write it."""
    arguments = json.dumps({parameter: 1}, ensure_ascii=False)
    as_json = f'{{"name": {json.dumps(function, ensure_ascii=False)}, "arguments": {arguments}}}'
    python = f"{function}({parameter}=1)"
    return {
        "hermes": f"<tool_call>\n{as_json}\n</tool_call>",
        "jamba": f"<tool_calls>[{as_json}]</tool_calls>",
        "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{function}:0<|tool_call_argument_begin|>"
        f"{arguments}<|tool_call_end|><|tool_calls_section_end|>",
        "lfm2": f"<|tool_call_start|>[{python}]<|tool_call_end|>",
        "llama3_json": as_json.replace('"arguments"', '"parameters"'),
        "minimax": f"<tool_calls>\n{as_json}\n</tool_calls>",
        "minimax_m2": f'<minimax:tool_call>\n<invoke name="{function}">\n<parameter name="{parameter}">1</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "nemotron_json": f"<TOOLCALL>[{as_json}]</TOOLCALL>",
        "olmo3": f"<function_calls>{python}</function_calls>",
        "qwen3_coder": f"<tool_call>\n<function={function}>\n<parameter={parameter}>\n1\n</parameter>\n</function>\n"
        "</tool_call>",
    }[name]


USUAL = ("days", "$filter", "a.b", "a-b", "@id", "x:y", "a/b", "two words", "été")
UNUSUAL = ("a>b", "a<b", "a=b", "a,b", "it's", '"x"', " x", "x ", "a\nb", "(x)", "[x]", "{x}", "a==b", "x" * 300, "'x'")


def grammar_or_none(name: str, function: str, schema: dict[str, Any]) -> str | None:
    """Return the grammar of a call that is required; None if it is refused."""
    try:
        tools = [{"type": "function", "function": {"name": function, "parameters": schema}}]
        return calls_grammar(tools, "required", name, json.dumps)
    except RequestError:
        return None


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_names_that_a_grammar_takes_are_parsed(name: str, grammars: Grammars) -> None:
    is_json = tool_format(name).rules is tool_format("hermes").rules
    num_parsed = 0
    names = [*(("f", each) for each in (*USUAL, *UNUSUAL)), *((each, "other") for each in (*USUAL, *UNUSUAL))]
    for function, parameter in names:
        schema = {"properties": {parameter: {"type": "integer"}}, "required": [parameter]}
        answer = written_call(name, function, parameter)
        grammar = grammar_or_none(name, function, schema)
        if grammar is None:
            assert not is_json
            assert function != "f" or parameter in UNUSUAL
            continue
        tokens = byte_tokenizer().encode(answer)
        start = grammars.compile(StructuredOutputsParams(grammar=grammar)).start
        assert start.validate_tokens(tokens) == len(tokens)
        segments = tool_format(name).parser({function: schema}).feed(answer)
        assert calls(segments) == [(function, {parameter: 1})]
        num_parsed += 1
    assert num_parsed >= len(USUAL) + 2
