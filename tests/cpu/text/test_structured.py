"""Structured outputs of a random model."""

import json
import re
import resource
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLParserLimits

from strandline import LLM, SamplingParams, StructuredOutputsParams
from strandline.device.sampling.grammar_mask import mask_logits
from strandline.errors import RequestError
from strandline.text import structured
from strandline.text.structured import Grammars, Matcher
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tokenizers import (
    CALLS_IN_JSON,
    CHAT_VOCAB_SIZE,
    ascii_tokenizer,
    byte_tokenizer,
    chat_template,
    chat_tokenizer,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size", "count"],
    "additionalProperties": False,
}
COMPACT = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
BYTES = Grammars(lambda: (byte_tokenizer(), frozenset({0})), 256)


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model(tmp_path_factory.mktemp("chat"), vocab_size=CHAT_VOCAB_SIZE)
    chat_tokenizer(chat_template(CALLS_IN_JSON, thinks=False)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llm(chat_dir: Path) -> LLM:
    return LLM(str(chat_dir), memory="16MiB", device="cpu")


def outputs(llm: LLM, structure: StructuredOutputsParams | None, prompt: str = "x", **wishes: Any) -> list[Any]:
    params = SamplingParams(
        **{"temperature": 1.0, "seed": 3, "max_tokens": 200, **wishes, "structured_outputs": structure}
    )
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs


def test_answer_follows_json_schema_with_any_seed(llm: LLM) -> None:
    for seed in range(5):
        [output] = outputs(llm, COMPACT, seed=seed)
        value = json.loads(output.text)
        assert output.finish_reason == "stop"
        assert set(value) == set(SCHEMA["required"])
        assert value["size"] in ("small", "large")
        assert 0 <= value["count"] <= 99
        assert len(value["name"]) <= 5


def test_greedy_answers_follow_grammar(llm: LLM) -> None:
    [output] = outputs(llm, COMPACT, temperature=0)
    assert set(json.loads(output.text)) == set(SCHEMA["required"])


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        (StructuredOutputsParams(regex="[a-c]{3}-[0-9]{2}"), "[a-c]{3}-[0-9]{2}"),
        (StructuredOutputsParams(choice=["yes", "no", 'a "quoted" one']), 'yes|no|a "quoted" one'),
        (StructuredOutputsParams(grammar='start: "<" N ">"\nN: /[0-9]{1,3}/'), "<[0-9]{1,3}>"),
        (StructuredOutputsParams(grammar='root ::= "a" b\nb ::= "x" | "yz"'), "a(x|yz)"),
    ],
)
def test_answer_follows_each_kind_of_grammar(llm: LLM, structure: StructuredOutputsParams, pattern: str) -> None:
    for seed in range(3):
        [output] = outputs(llm, structure, seed=seed)
        assert re.fullmatch(pattern, output.text), output.text
        assert output.finish_reason == "stop"


def test_grammar_does_not_change_other_rows_of_batch(llm: LLM) -> None:
    plain = SamplingParams(temperature=1.2, seed=1, max_tokens=30)
    bound = SamplingParams(seed=2, max_tokens=100, structured_outputs=COMPACT)
    alone = [llm.generate("hello", params, use_tqdm=False)[0].outputs[0].token_ids for params in (plain, bound)]
    together = llm.generate(["hello", "hello", "hello"], [plain, bound, plain], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together] == [alone[0], alone[1], alone[0]]


def test_each_of_several_outputs_follows_grammar(llm: LLM) -> None:
    texts = {output.text for output in outputs(llm, StructuredOutputsParams(regex="[a-z]{6}"), n=4)}
    assert len(texts) > 1
    assert all(re.fullmatch("[a-z]{6}", text) for text in texts)


def test_the_answer_is_the_same_after_a_hit(llm: LLM) -> None:
    texts = [outputs(llm, COMPACT, prompt="the same prompt, twice")[0].text for _ in range(2)]
    assert texts[0] == texts[1]


def test_the_answer_is_the_same_after_a_preemption(chat_dir: Path) -> None:
    params = SamplingParams(seed=5, max_tokens=150, structured_outputs=StructuredOutputsParams(regex="[a-z]{140}"))
    prompts = [f"prompt {index} " * 9 for index in range(4)]
    roomy = LLM(str(chat_dir), memory="16MiB", device="cpu")
    expected = [output.outputs[0].text for output in roomy.generate(prompts, params, use_tqdm=False)]
    tight = LLM(str(chat_dir), memory="192KiB", max_model_len=256, device="cpu")
    found = [output.outputs[0].text for output in tight.generate(prompts, params, use_tqdm=False)]
    assert tight.engine.scheduler.num_preemptions > 0
    assert found == expected


def test_a_grammar_may_begin_after_free_text(llm: LLM) -> None:
    structure = StructuredOutputsParams(choice=["yes", "no"], after="</think>")
    bias = {llm.get_tokenizer().convert_tokens_to_ids("</think>"): 4.0}
    [output] = outputs(llm, structure, logit_bias=bias, seed=8, max_tokens=400)
    thought, _, answer = output.text.partition("</think>")
    assert thought
    assert re.fullmatch(r"\s{0,4}(yes|no)", answer)


def test_satisfied_grammar_ends_output_despite_min_tokens(llm: LLM) -> None:
    [output] = outputs(llm, StructuredOutputsParams(choice=["yes"]), min_tokens=6)
    assert output.text == "yes"
    assert len(output.token_ids) > 6


def test_text_that_reads_like_a_tag_is_spelled_out(llm: LLM) -> None:
    text = 'so <tool_call> and <|im_end|> and "</think>"'
    [output] = outputs(llm, StructuredOutputsParams(choice=[text]))
    assert output.text == text
    assert len(output.token_ids) == len(text) + 1


def test_bans_that_leave_nothing_give_way_to_the_grammar(llm: LLM) -> None:
    [output] = outputs(llm, StructuredOutputsParams(choice=["bab"]), bad_words=["a", "b"])
    assert output.text == "bab"


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"json": {"type": "strin"}}, "structured_outputs.json cannot be used: Invalid type: strin"),
        ({"json": "{"}, "is not a JSON schema"),
        ({"json": "[" * 100_000}, "is not a JSON schema: maximum recursion depth"),
        ({"grammar": "start: %json " + "[" * 100_000}, "follows %json in the grammar is not a JSON schema"),
        ({"regex": "(["}, "structured_outputs.regex cannot be used: .*regex parse error"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
        ({"grammar": "root ::= ("}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of json, regex"),
        ({"choice": []}, "non-empty"),
        ({"regex": "a" * 600_000}, "has 600131 characters as a grammar, at most 524288"),
        ({"json": {"$ref": "#"}}, "nothing can fulfil it"),
        ({"grammar": "start: A\nA: /(.*a.{30})/ & ~/(.*b.{30})/"}, "must not use & or ~"),
        (
            {"grammar": 'start: %json {"allOf": [{"pattern": "a"}, {"pattern": "b"}]}'},
            "binds one string to the patterns",
        ),
        ({"json": {"allOf": [{"pattern": "a"}, {"pattern": "b"}]}}, "binds one string to the patterns"),
        ({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "nothing can fulfil it"),
    ],
)
def test_a_wrong_grammar_is_refused_and_says_why(llm: LLM, wish: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        outputs(llm, StructuredOutputsParams(**wish))
    assert not llm.engine.has_unfinished


def test_repetitions_and_strings_are_not_set_operations(llm: LLM) -> None:
    [output] = outputs(llm, StructuredOutputsParams(grammar='start: "a&b~"~3 /[&~]{2}/  // & and ~'))
    assert re.fullmatch("(a&b~){3}[&~]{2}", output.text)


def test_long_text_without_a_choice_takes_no_memory() -> None:
    page_bytes, statm = resource.getpagesize(), Path("/proc/self/statm")
    before = int(statm.read_text().split()[1])
    matcher = BYTES.matcher(StructuredOutputsParams(regex="((a{1000}b){1000}c){10}"), {0})
    for token in byte_tokenizer().encode("aaa"):
        matcher.fill(np.zeros((1, 9), dtype=np.int32), 0)
        matcher.append(token)
    assert (int(statm.read_text().split()[1]) - before) * page_bytes < 32 * 2**20


def test_failed_grammar_ends_only_its_own_output(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LLParserLimits(max_lexer_states=30, precompute_large_lexemes=False, verbose_errors=False)
    plain = SamplingParams(seed=1, max_tokens=60)
    alone = llm.generate("x", plain, use_tqdm=False)[0].outputs[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(structured, "LIMITS", limits)
        bound = SamplingParams(seed=1, max_tokens=60, structured_outputs=StructuredOutputsParams(regex="[b-y]{100}"))
        [other], [failed] = [output.outputs for output in llm.generate(["x", "x"], [plain, bound], use_tqdm=False)]
    assert (failed.finish_reason, other.finish_reason) == ("error", "length")
    assert other.token_ids == alone


@pytest.mark.parametrize("method", ["fill", "append", "__init__"])
def test_matcher_that_raises_ends_only_its_own_output(llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(Matcher, method, fail)
    params = [SamplingParams(seed=1, max_tokens=9, structured_outputs=structure) for structure in (COMPACT, None)]
    [failed], [other] = [output.outputs for output in llm.generate(["x", "x"], params, use_tqdm=False)]
    assert (failed.finish_reason, other.finish_reason) == ("error", "length")


def test_compiled_grammars_are_kept_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(lambda: (byte_tokenizer(), frozenset({0})), 256)
    monkeypatch.setattr(structured, "MAX_KEPT_BYTES", 10 * structured.BYTES_PER_GRAMMAR)
    long = StructuredOutputsParams(regex="a" * (6 * structured.BYTES_PER_GRAMMAR // structured.BYTES_PER_CHARACTER))
    short = [StructuredOutputsParams(regex=letter) for letter in "abcdefgh"]

    first = weakref.ref(grammars.compile(long))
    assert grammars.compile(long) is first()
    for structure in short[:2]:
        grammars.compile(structure)
    assert first() is not None
    for structure in short[2:]:
        grammars.compile(structure)
    assert first() is None


def test_of_very_many_choices_one_is_made(llm: LLM) -> None:
    choices = [f"v{index}" for index in range(20_000)]
    [output] = outputs(llm, StructuredOutputsParams(choice=choices))
    assert output.text in choices


def test_a_choice_may_begin_with_another(llm: LLM) -> None:
    structure = StructuredOutputsParams(choice=["a", "ab", "abc"])
    end = llm.get_tokenizer().eos_token_id
    for bias, text in ((100.0, "a"), (-100.0, "abc")):
        [output] = outputs(llm, structure, logit_bias={end: bias}, temperature=0)
        assert output.text == text


def test_an_object_may_have_thousands_of_optional_properties(llm: LLM) -> None:
    properties = {f"p{index}": {"const": 1} for index in range(4000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    structure = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    [output] = outputs(llm, structure, max_tokens=4000, logit_bias={llm.get_tokenizer().encode("}")[0]: 2.0})
    assert set(json.loads(output.text)) <= set(properties)


def test_structured_output_without_end_token_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="needs a token that ends the output"):
        outputs(llm, StructuredOutputsParams(regex="a"), ignore_eos=True)
    eos = llm.get_tokenizer().eos_token_id
    [output] = outputs(llm, StructuredOutputsParams(regex="a"), ignore_eos=True, stop_token_ids=[eos])
    assert output.text == "a"


def test_grammars_work_without_an_end_token() -> None:
    grammars = Grammars(lambda: (byte_tokenizer(), frozenset()), 256)
    matcher = grammars.matcher(StructuredOutputsParams(choice=["a"]), {7})
    words = np.zeros((1, 9), dtype=np.int32)
    matcher.fill(words, 0)
    assert np.unpackbits(words.view(np.uint8)).sum() == 1
    [first] = byte_tokenizer().encode("a")
    matcher.append(first)
    matcher.fill(words, 0)
    assert words.view(np.uint32)[0].tolist() == [1 << 7, *[0] * 8]


def test_without_a_tokenizer_structured_outputs_are_refused(chat_dir: Path) -> None:
    bare = LLM(str(chat_dir), memory="16MiB", device="cpu", skip_tokenizer_init=True)
    params = SamplingParams(stop_token_ids=[1], structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match="need a tokenizer"):
        bare.generate([[1, 2]], params, use_tqdm=False)


SPACES = byte_tokenizer().encode(" \n\t\r")


def most_white_space(structure: StructuredOutputsParams, text: str) -> int:
    """Return the longest run of white space, at most 100, that may come between the tokens of a JSON text."""
    longest = 0
    for end in (0, *(found.end() for found in re.finditer(r'"\w+"|\w+|\W', text))):
        matcher = BYTES.matcher(structure, {0})
        for token in byte_tokenizer().encode(text[:end]):
            matcher.append(token)
        words = np.zeros((1, 9), dtype=np.int32)
        for length in range(100):
            matcher.fill(words, 0)
            allowed = [token for token in SPACES if words.view(np.uint32)[0, token // 32] >> token % 32 & 1]
            if not allowed:
                break
            longest = max(longest, length + 1)
            matcher.append(allowed[length % len(allowed)])
    return longest


LIST: dict[str, Any] = {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize(
    ("structure", "text", "expected"),
    [
        (StructuredOutputsParams(json=LIST), '[{"a":1},{}]', 1),
        (StructuredOutputsParams(json=json.dumps(LIST)), '[{"a":1},{}]', 1),
        (StructuredOutputsParams(json="true"), '[{"a":1},{}]', 1),
        (StructuredOutputsParams(json_object=True), '{"a":[1,true]}', 1),
        (StructuredOutputsParams(json=LIST | {"x-guidance": {"lenient": True}}), '[{"a":1},{}]', 1),
        (StructuredOutputsParams(json=LIST | {"x-guidance": {"whitespace_pattern": " {1,3}"}}), '[{"a":1}]', 3),
        (StructuredOutputsParams(json=LIST | {"x-guidance": {"whitespace_flexible": True}}), '[{"a":1}]', 100),
        (StructuredOutputsParams(json=LIST, whitespace_pattern="[ \n]{1,5}"), '[{"a":1},{}]', 5),
        (StructuredOutputsParams(json=LIST, disable_any_whitespace=True), '[{"a":1},{}]', 0),
        (
            StructuredOutputsParams(
                json=LIST | {"x-guidance": {"whitespace_pattern": " +"}}, disable_any_whitespace=True
            ),
            '[{"a":1}]',
            0,
        ),
    ],
)
def test_white_space_in_json_is_bounded(structure: StructuredOutputsParams, text: str, expected: int) -> None:
    assert most_white_space(structure, text) == expected


class _Fixed(Matcher):
    """Allows the same tokens always."""

    def __init__(self, *allowed: int) -> None:
        self._allowed = allowed

    def fill(self, words: Any, row: int) -> None:
        words[row] = 0
        for token in self._allowed:
            words.view(np.uint32)[row, token // 32] |= np.uint32(1 << token % 32)


def test_masks_change_only_their_rows() -> None:
    logits = torch.arange(3 * 70, dtype=torch.float32).reshape(3, 70)
    expected = logits.clone()
    mask_logits(logits, [1], [_Fixed(0, 31, 63, 69)])
    assert torch.equal(logits[[0, 2]], expected[[0, 2]])
    assert torch.nonzero(torch.isfinite(logits[1])).flatten().tolist() == [0, 31, 63, 69]
    assert logits[1, 69] == expected[1, 69]


def test_tokenizer_that_llguidance_cannot_read_is_said() -> None:
    grammars = Grammars(lambda: (ascii_tokenizer(), frozenset({95})), 97)
    with pytest.raises(RequestError, match="structured outputs cannot be used with this tokenizer: "):
        grammars.check(StructuredOutputsParams(regex="a"))
