"""Reasoning that a call ends: its parser, its grammar, and the stop strings that hold after it agree where it ends."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline import SamplingParams, StructuredOutputsParams
from strandline.records.reasoning_rules import CallTag, ReasoningRules
from strandline.server.requests.output_parser import OutputFormat, OutputParser
from strandline.text.detokenizer import Detokenizer
from strandline.text.reasoning import ThinkParser
from strandline.text.structured import Grammars
from strandline.text.tool_formats import ALIASES, TOOL_FORMATS, tool_format
from tests.cpu.engine.tokenizers import CHAT_VOCAB_SIZE, byte_tokenizer, chat_tokenizer
from tests.cpu.text.calls_grammar import calls_grammar

SCHEMAS: dict[str, Any] = {"read": {"type": "object", "properties": {"path": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": SCHEMAS["read"]}}]
CALLS = [{"id": "functions.read:0", "function": {"name": "read", "arguments": {"path": "a"}}}]
TAGGED = sorted(set(TOOL_FORMATS) - {"llama3_json"})
TAG = "<tool_call>"
CHAT_TOKENIZER = chat_tokenizer("")
SHARDS = ["a", " ", "\t", "\n", "\u00a0", "<", "</think>", "<think>", TAG, "</tool_call>", "</", "<tool", "stop"]


def parse(name: str, *texts: str, prompt: str = "<think>\n", tools: bool = True) -> OutputParser:
    parser = OutputFormat(name, "qwen3").parser(prompt, SCHEMAS if tools else None)
    for text in texts:
        parser.feed(text)
    parser.finish()
    return parser


def summary(parser: OutputParser) -> tuple[str, str, list[tuple[str, str]]]:
    return parser.reasoning, parser.content, [(call.name, call.arguments) for call in parser.calls]


@pytest.mark.parametrize("name", sorted({*TAGGED, *ALIASES}))
@pytest.mark.parametrize("prompt", ["<think>\n", ""])
@pytest.mark.parametrize("before", ["I read.\n", "I read.\n\n  ", "", "One.\nTwo.\n\t"])
def test_call_inside_unclosed_reasoning_ends_it(name: str, prompt: str, before: str) -> None:
    call = tool_format(name).write(CALLS)
    text = ("" if prompt else "<think>\n") + before + call
    parsed = parse(name, text, prompt=prompt)
    assert (parsed.reasoning, parsed.content) == (before.rstrip(), "")
    assert [(each.name, json.loads(each.arguments)) for each in parsed.calls] == [("read", {"path": "a"})]
    assert summary(parse(name, *text, prompt=prompt)) == summary(parsed)


@pytest.mark.parametrize("name", TAGGED)
def test_call_tag_ends_nothing_without_tools_or_inside_a_line(name: str) -> None:
    call = tool_format(name).write(CALLS)
    assert summary(parse(name, f"I read.\n{call}", tools=False)) == (f"I read.\n{call}", "", [])
    mentioned = f"I could write {call}\n</think>\n\nDone."
    assert summary(parse(name, mentioned)) == (f"I could write {call}", "Done.", [])


def test_llama_calls_have_no_tag_that_ends_reasoning() -> None:
    call = tool_format("llama3_json").write(CALLS)
    assert summary(parse("llama3_json", f"I read.\n{call}")) == (f"I read.\n{call}", "", [])


@pytest.mark.parametrize(
    ("after", "content"),
    [
        ("\n</think>\n\nDone.", "Done."),
        ("</think>", ""),
        (" Wait.\n</think>\nDone </think>.", "Wait.\n\nDone </think>."),
        ("\n</thin", "</thin"),
    ],
)
def test_tag_that_closes_reasoning_after_a_call_is_dropped(after: str, content: str) -> None:
    text = f"Hm.\n{tool_format('hermes').write(CALLS)}{after}"
    parsed = parse("hermes", text)
    assert (parsed.reasoning, parsed.content, len(parsed.calls)) == ("Hm.", content, 1)
    assert summary(parse("hermes", *text)) == summary(parsed)


@given(st.sampled_from(["hermes", "qwen3_coder", "kimi_k2"]), st.lists(st.sampled_from(SHARDS), max_size=12), st.data())
def test_how_the_text_is_cut_changes_no_output(name: str, shards: list[str], data: st.DataObject) -> None:
    text = "".join(shards) + data.draw(st.sampled_from(["", tool_format(name).write(CALLS) + "\n</think>\nb"]))
    marks = data.draw(st.sets(st.sampled_from([at for at in range(len(text)) if text[at:].startswith(TAG)] or [0])))
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    results = []
    for cuts in ([], places, range(len(text))):
        parser = OutputFormat(name, "qwen3").parser("<think>\n", SCHEMAS)
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            parser.feed(text[start:end], [mark - start for mark in marks if start <= mark < end])
        parser.finish()
        results.append(summary(parser))
    assert results[0] == results[1] == results[2]


def feed(tokens: Sequence[int], params: SamplingParams, rules: ReasoningRules) -> tuple[str, str | None, OutputParser]:
    """Return the streamed text, the stop string, and the parsed output."""
    detokenizer = Detokenizer(CHAT_TOKENIZER, params, frozenset(), rules)
    parser = OutputFormat("hermes", "qwen3").parser("<think>" if rules.is_open else "", SCHEMAS)
    text, stop = "", None
    for token in tokens:
        stop = detokenizer.append(token, may_stop=True)
        taken = detokenizer.take()
        text += taken.text
        parser.feed(*taken)
        if stop is not None:
            break
    detokenizer.finish()
    taken = detokenizer.take()
    parser.feed(*taken)
    parser.finish()
    return text + taken.text, stop, parser


def test_special_token_of_a_call_ends_reasoning_inside_a_line() -> None:
    rules = ReasoningRules(True, CallTag(TAG, CHAT_TOKENIZER.get_added_vocab()[TAG]))
    call = tool_format("hermes").write(CALLS)
    tokens = CHAT_TOKENIZER.encode(f"I read. {call}")
    assert summary(feed(tokens, SamplingParams(), rules)[2]) == ("I read.", "", [("read", '{"path": "a"}')])
    spelled = byte_tokenizer().encode(f"I read. {call}")
    assert summary(feed(spelled, SamplingParams(), rules)[2]) == (f"I read. {call}", "", [])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nQuestion: what?\n</think>\n\nQuestion: blue.", "Question: what?", ""),
        ("<think>\nQuestion: what?\n</think>\n\nIt is. Question: blue.", "Question: what?", "It is. "),
        ("<think>\nQuestion: what?\n</think>\n\nQuest", "Question: what?", "Quest"),
        ("<think>\nQuest</think>ion: what?", "Quest", "ion: what?"),
        ("Question: what?", "", ""),
        (" Question: what?", "", " "),
        ("<thought> Question: what?", "", "<thought> "),
    ],
)
def test_stop_strings_hold_for_content(text: str, reasoning: str, content: str) -> None:
    rules, params = ReasoningRules(False), SamplingParams(stop=["Question:"])
    for tokens in (CHAT_TOKENIZER.encode(text), byte_tokenizer().encode(text)):
        _, stop, parser = feed(tokens, params, rules)
        assert (parser.reasoning, parser.content) == (reasoning, content)
        assert (stop is None) == ("Question:" not in text.split("</think>")[-1])


@given(st.lists(st.sampled_from(SHARDS), max_size=14), st.booleans(), st.sampled_from(["stop", "\n", "<", "a s"]))
def test_stop_string_cuts_the_content_and_nothing_else(shards: list[str], is_open: bool, stop: str) -> None:
    text = "".join(shards)
    rules = ReasoningRules(is_open, CallTag(TAG, None))
    think = ThinkParser.of(rules)
    think.feed(text)
    start = think.content_start
    expected = -1 if start is None else text.find(stop, start)
    shown, found, _ = feed(byte_tokenizer().encode(text), SamplingParams(stop=[stop]), rules)
    assert (shown, found) == ((text, None) if expected < 0 else (text[:expected], stop))


@pytest.fixture(scope="module", params=["text", "special tokens"])
def grammars(request: pytest.FixtureRequest) -> Grammars:
    if request.param == "text":
        return Grammars(lambda: (byte_tokenizer(), frozenset({0})), 256)
    return Grammars(lambda: (CHAT_TOKENIZER, frozenset({257})), CHAT_VOCAB_SIZE)


@pytest.mark.parametrize("name", sorted({*TOOL_FORMATS, *ALIASES}))
def test_required_call_may_follow_or_end_the_reasoning(name: str, grammars: Grammars) -> None:
    grammar = calls_grammar(TOOLS, "required", name, grammars.tag, "</think>")
    start = grammars.compile(StructuredOutputsParams(grammar=grammar)).start
    tokenizer, _ = grammars._load_tokenizer()
    call = tool_format(name).write(CALLS)
    answers = [f"I read.\n</think>\n\n{call}"] + [f"I read.\n{call}"] * (name != "llama3_json")
    for answer in answers:
        matcher, tokens = start.deep_copy(), tokenizer.encode(answer)
        assert matcher.validate_tokens(tokens) == len(tokens)
        assert matcher.consume_tokens(tokens)
        assert matcher.is_accepting()
        assert [(each.name, json.loads(each.arguments)) for each in parse(name, answer).calls] == [
            ("read", {"path": "a"})
        ]


@given(st.lists(st.sampled_from([*"</tool_call>", *filter(str.isascii, SHARDS)]), max_size=16), st.booleans())
def test_required_call_is_constrained_where_reasoning_has_ended(shards: list[str], is_spelled: bool) -> None:
    matcher, free = GRAMMARS.compile(REQUIRED).start.deep_copy(), byte_tokenizer().encode("q")
    rules = ReasoningRules(True, CallTag(TAG, CHAT_TOKENIZER.get_added_vocab()[TAG]))
    detokenizer, think = Detokenizer(CHAT_TOKENIZER, SamplingParams(), frozenset(), rules), ThinkParser.of(rules)
    for token in (byte_tokenizer() if is_spelled else CHAT_TOKENIZER).encode("".join(shards)):
        if not matcher.validate_tokens([token]):
            break
        matcher.consume_token(token)
        detokenizer.append(token, may_stop=True)
        think.feed(*detokenizer.take())
        assert bool(matcher.validate_tokens(free)) == think.is_inside


GRAMMARS = Grammars(lambda: (CHAT_TOKENIZER, frozenset({257})), CHAT_VOCAB_SIZE)
REQUIRED = StructuredOutputsParams(grammar=calls_grammar(TOOLS, "required", "hermes", GRAMMARS.tag, "</think>"))
