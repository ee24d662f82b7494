"""Log-probabilities of a message are those of the tokens that its text is made of."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from strandline.records.events import FinishReason, Limits, SpeculationStats, StepEvents, TokenEvent
from strandline.records.outputs import Logprob, OutputDelta
from strandline.records.plan import TokenLogprobs
from strandline.records.sampling_params import SamplingParams
from strandline.server.requests.output_parser import CHANNELS, OutputFormat, OutputParser
from strandline.server.requests.text_logprobs import TextLogprobs
from strandline.server.requests.usage_and_logprobs import Json
from strandline.server.responses.items import Items
from strandline.server.responses.tools import ToolName
from strandline.text.frontend import Frontend
from strandline.text.token_bytes import TokenBytes
from tests.cpu.engine.tokenizers import byte_tokenizer

END = "<end>"
SCHEMAS: dict[str, Any] = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
Shards = tuple[tuple[bytes, ...], ...]
"""Parts of answers, each as tokens."""
TEXTS: Shards = (
    *((b"Yes", b".\n\n"), (b"\n",), (b" ",), (b"a<b",), (b"x",), ("é".encode(),), (b" x \xe6", b"\x97\xa5")),
    *((b" \xf0\x9f", b"\x98", b"\x80 a"), (b"st", b"op s"), (b".stop!",), (b"END",)),
)
"""Words, also halves of characters, and stop strings."""
THOUGHTS: Shards = ((b"<think>",), (b"</th", b"ink>\n\nSo"), (b"hm</think>",), (b"</think>",))
IN_JSON: Shards = (
    *((b"<tool_call>",), (b"See.<tool", b"_call>{"), (b"</tool_call>\nOk",), (b"</tool_call>",)),
    *((b'{"name": "f", "arguments": {"a": "b"}}',), (b'<tool_call>{"name": "f", "arguments": {}}</tool_call> Ok',)),
)
IN_TAGS: Shards = (
    *(
        (b"<tool_call>",),
        (b"See.<function=f>",),
        (b"<parameter=",),
        (b"<parameter=a>b</parameter>is",),
        (b"</tool_call>",),
    ),
    *((b"<function=f><parameter=a>b</parameter>",), (b"</function>s",), (b"</parameter>\n",), (b"<function=",)),
)
IN_SECTIONS: Shards = (
    *((b"<|tool_calls_section_begin|>",), (b"See.<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}",)),
    *((b"<|tool_call_begin|>",), (b"f",), (b"<|tool_call_end|>",), (b"<|tool_calls_section_end|>so",)),
)
IN_PYTHON: Shards = (
    *((b"[<|tool_call_start|>",), (b"f(a=1)",), (b"f(",), (b"<|tool_call_end|>Ok",), (b"<|tool_call_end|>",)),
)
BARE: Shards = ((b"<|python_tag|>", b'{"name": "f", "parameters": {}}'), (b'; {"name": "f"',), (b"So<|python_tag|>x",))
IN_CHANNELS: Shards = (
    *((b"<|channel|>final<|message|>",), (b"<|channel|>commentary to=functions.f<|message|>", b"{}"), (b"<|end|>",)),
    *((b"<|start|>assistant<|channel|>analysis",), (b"<|message|>Hm", b".<|end|>"), (b" to=",)),
)
FORMATS: tuple[tuple[OutputFormat, Any, Shards], ...] = (
    *((OutputFormat(), None, ()), (OutputFormat("none", "qwen3"), None, THOUGHTS)),
    *((OutputFormat("hermes", reasoning), SCHEMAS, THOUGHTS + IN_JSON) for reasoning in ("none", "deepseek_r1")),
    *((OutputFormat("qwen3_coder", reasoning), SCHEMAS, THOUGHTS + IN_TAGS) for reasoning in ("none", "deepseek_r1")),
    *((OutputFormat("kimi_k2", "qwen3"), SCHEMAS, THOUGHTS + IN_SECTIONS), (OutputFormat("lfm2"), SCHEMAS, IN_PYTHON)),
    *((OutputFormat("llama3_json"), SCHEMAS, BARE),),
    *((OutputFormat("none", "openai_gptoss"), schemas, IN_CHANNELS) for schemas in (None, SCHEMAS)),
)
"""How outputs are parsed, and parts of answers in these formats: some tokens end one part and begin another."""


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTER_OF = {TokenBytes(byte_tokenizer())[token]: letter for token, letter in enumerate(LETTERS)}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of these words, of bytes and of a token that ends the output and is no text."""
    vocab = {letter: token for token, letter in enumerate(LETTERS)}
    for word in [word for shards in (TEXTS, *(shards for *_, shards in FORMATS)) for shard in shards for word in shard]:
        vocab.setdefault(written(word), len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def written(word: bytes) -> str:
    """Return a token as the tokenizer writes it."""
    return "".join(LETTER_OF[bytes([value])] for value in word)


TOKENIZER = word_tokenizer()
END_ID = TOKENIZER.eos_token_id


class Answer(NamedTuple):
    items: list[Json]
    deltas: list[Json]
    """Events of text."""


def answer(
    tokens: Sequence[bytes | None], parser: OutputParser, params: SamplingParams, taken_after: Collection[int] = ()
) -> Answer:
    """Return the items of an output of these tokens; None: the end token. The log-probability of each is its index."""
    frontend = Frontend(Limits(len(TOKENIZER), 4096), tokenizer=TOKENIZER, clock=lambda: 0.0)
    [submission] = frontend.open("r", frontend.check([1], frontend.check_params(params)))
    stream = frontend.requests["r"]
    logprobs = TextLogprobs(0)
    items = Items(lambda name: ToolName("function", name), logprobs)
    events: list[Json] = []
    for index, word in enumerate(tokens):
        token = END_ID if word is None else TOKENIZER.convert_tokens_to_ids(written(word))
        reason = FinishReason.LENGTH if index == len(tokens) - 1 else None
        entry = TokenLogprobs(token, -float(index), 1, (), (), ())
        frontend.take(StepEvents([TokenEvent(submission.new.request_id, token, entry, reason, None, None)]))
        if index in taken_after or stream.is_finished:
            [output] = stream.take().outputs
            logprobs.add(output)
            events += items.append(parser.feed(output.text))
        if stream.is_finished:
            break
    events += items.append(parser.finish()) + items.finish("completed")
    return Answer(items.items, [event for event in events if event["type"] == "response.output_text.delta"])


def letters(text: bytes) -> list[bytes]:
    """Return a text as tokens of a byte each."""
    return [bytes([value]) for value in text]


def messages(items: Sequence[Json]) -> list[Json]:
    """Return the texts of messages, with their log-probabilities."""
    return [item["content"][0] for item in items if item["type"] == "message"]


def said(items: Sequence[Json]) -> list[Any]:
    """Return items without their ids."""
    return [(item["type"], item.get("content"), item.get("arguments")) for item in items]


def indices(part: Json) -> list[int]:
    """Return which tokens a text has the log-probabilities of."""
    return [-round(entry["logprob"]) for entry in part["logprobs"]]


@st.composite
def outputs(draw: st.DrawFn) -> tuple[OutputFormat, Any, list[bytes]]:
    """Return how an output is parsed, the schemas of its calls, and its tokens; the last may be half a character."""
    parsed, schemas, shards = draw(st.sampled_from(FORMATS))
    drawn = draw(st.lists(st.sampled_from(shards + TEXTS) | st.sampled_from(shards or TEXTS), min_size=1, max_size=12))
    words = [word for shard in drawn for word in shard]
    return parsed, schemas, words[: max(len(words) - draw(st.integers(0, 1)), 1)]


@settings(max_examples=4 * settings().max_examples)
@given(outputs(), st.sampled_from(((), ("stop",), ("END", "stop s"))), st.booleans(), st.sets(st.integers(0, 40)))
def test_messages_have_the_logprobs_of_the_tokens_of_their_text(
    output: tuple[OutputFormat, Any, list[bytes]], stops: Sequence[str], keeps_stop: bool, taken_after: set[int]
) -> None:
    parsed, schemas, words = output
    params = SamplingParams(logprobs=0, max_tokens=4000, stop=list(stops), include_stop_str_in_output=keeps_stop)
    whole = answer([*words, None], parsed.parser("", schemas), params)
    streamed = answer([*words, None], parsed.parser("", schemas), params, taken_after)
    assert said(streamed.items) == said(whole.items)
    entries = [entry for event in streamed.deltas for entry in event["logprobs"]]
    assert entries == [entry for part in messages(whole.items) for entry in part["logprobs"]]

    # Where each token is a byte, these are exactly the bytes of the text; other tokens are those that have such a byte.
    by_byte = answer(letters(b"".join(words)), parsed.parser("", schemas), params)
    word_of = [index for index, word in enumerate(words) for _ in word]
    for part, part_by_byte in zip(messages(whole.items), messages(by_byte.items), strict=True):
        text = part["text"]
        joined = bytes(value for entry in part_by_byte["logprobs"] for value in entry["bytes"]).decode(errors="replace")
        if parsed.reasoning == CHANNELS:  # what separates messages of a kind is no token
            text, joined = "".join(text.split()), "".join(joined.split())
        assert joined == text
        assert part["text"] == part_by_byte["text"]
        assert indices(part) == list(dict.fromkeys(word_of[index] for index in indices(part_by_byte)))


def test_token_of_two_messages_is_in_both() -> None:
    words = [b"See.<tool", b"_call>{", *letters(b'"name": "f", "arguments": {}}</tool_call>'), b"x", None]
    parts = messages(answer(words, OutputFormat("hermes").parser("", SCHEMAS), SamplingParams(logprobs=0)).items)
    assert [(part["text"], indices(part)) for part in parts] == [("See.", [0]), ("x", [len(words) - 2])]
    logprobs = TextLogprobs(0)
    logprobs.add(delta([(0, 5), (5, 6)]))
    assert [len(logprobs.take([(0, 1)])), len(logprobs.take([(1, 2)]))] == [1, 0]
    logprobs.begin()
    assert [len(logprobs.take([(4, 6)])), len(logprobs.take([]))] == [2, 0]


def test_tokens_of_half_a_character_wait_for_the_other_half() -> None:
    logprobs = TextLogprobs(0)
    logprobs.add(delta([(0, 0)]))
    logprobs.add(delta([None, (0, 2), (2, 2)]))
    assert [indices({"logprobs": logprobs.take([span])}) for span in [(1, 2), (2, 3)]] == [[0, 1], [2]]


def delta(spans: Sequence[tuple[int, int] | None]) -> OutputDelta:
    """Return tokens that make these characters."""
    entries = [{0: Logprob(-float(index), 1, "x")} for index in range(len(spans))]
    return OutputDelta(0, "", [0] * len(spans), entries, 0, 0.0, None, None, SpeculationStats(), token_spans=spans)
