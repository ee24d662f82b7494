"""Deltas of a request's outputs add up to what is taken at once, however often they are taken."""

import pickle
from collections.abc import Sequence
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.errors import RequestError
from strandline.ids import RequestId
from strandline.records.events import FinishReason, Limits, StepEvents, TokenEvent
from strandline.records.outputs import RequestDelta, RequestOutput
from strandline.records.plan import TokenLogprobs
from strandline.records.sampling_params import SamplingParams, StructuredOutputsParams
from strandline.text.detokenizer import Detokenizer
from strandline.text.frontend import Frontend
from strandline.text.structured import Grammars
from tests.cpu.engine.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
LIMITS = Limits(vocab_size=256, max_model_len=64)
PARAMS = SamplingParams(n=2, stop=["stop"], logprobs=1, max_tokens=30)


def step_of(names: Sequence[RequestId], token: int, reason: FinishReason | None) -> StepEvents:
    logprobs = TokenLogprobs(token, -0.5, 1, (token,), (-0.5,), (1,))
    return StepEvents([TokenEvent(name, token, logprobs, reason, None, None) for name in names])


def run(
    tokens: Sequence[int], taken_after: set[int], interval: int = 0, params: SamplingParams = PARAMS
) -> tuple[RequestOutput, list[RequestDelta]]:
    """Return the output of two equal sequences, and the deltas that were taken after some of the steps.

    Args:
        interval: take also what is due at this interval; 0: nothing.
    """
    frontend = Frontend(LIMITS, tokenizer=TOKENIZER, clock=lambda: 0.0)
    request = frontend.check([1, 2, 3], frontend.check_params(params))
    names = [submission.new.request_id for submission in frontend.open("r", request)]
    stream = frontend.requests["r"]
    output, deltas = stream.empty_output(), []
    for index, token in enumerate(tokens):
        frontend.take(step_of(names, token, FinishReason.LENGTH if index == len(tokens) - 1 else None))
        if index in taken_after or stream.is_finished or (interval and stream.is_due(interval)):
            deltas.append(stream.take())
            output.extend(deltas[-1])
        if stream.is_finished:
            break
    return output, deltas


@given(st.text("stopé日", min_size=1, max_size=8), st.sets(st.integers(0, 30)))
def test_deltas_add_up_to_the_whole_output(text: str, taken_after: set[int]) -> None:
    tokens = TOKENIZER.encode(text)
    whole, [delta] = run(tokens, set())
    grown, deltas = run(tokens, taken_after)
    assert grown == whole
    assert whole.finished
    assert [output.text for output in whole.outputs] == [text.partition("stop")[0]] * 2
    assert [output.token_ids for output in delta.outputs] == [output.token_ids for output in whole.outputs]
    ends = [output.finish_reason for delta in deltas for output in delta.outputs if output.finish_reason is not None]
    assert len(ends) == 2


def test_delta_holds_only_what_is_new() -> None:
    _, deltas = run(TOKENIZER.encode("abcdefgh"), set(range(8)))
    firsts = [delta.outputs[0] for delta in deltas]
    assert [len(output.token_ids) for output in firsts] == [1] * 8
    assert [len(output.logprobs or ()) for output in firsts] == [1] * 8
    assert [output.num_tokens for output in firsts] == list(range(1, 9))
    assert "".join(output.text for output in firsts) == "abcdefgh"


def test_each_token_has_the_characters_that_it_adds() -> None:
    _, [delta] = run(TOKENIZER.encode("aé日b"), set())
    halves = [(1, 1), (1, 2), (2, 2), (2, 2), (2, 3)]  # the last token of a character adds it
    assert [list(output.token_spans) for output in delta.outputs] == [[(0, 1), *halves, (3, 4)]] * 2


def test_characters_are_counted_only_for_logprobs() -> None:
    params = SamplingParams(max_tokens=30)
    with patch.object(Detokenizer, "num_characters", PropertyMock(side_effect=AssertionError)):
        output, [delta] = run(TOKENIZER.encode("aé"), set(), params=params)
    assert (output.outputs[0].text, list(delta.outputs[0].token_spans)) == ("aé", [])


@pytest.mark.parametrize(
    ("interval", "sizes"), [(1, [1] * 8), (3, [1, 3, 3, 1]), (7, [1, 7]), (8, [1, 7]), (100, [1, 7])]
)
def test_first_token_and_end_are_due_at_once(interval: int, sizes: list[int]) -> None:
    _, deltas = run(TOKENIZER.encode("abcdefgh"), set(), interval)
    assert [len(delta.outputs[0].token_ids) for delta in deltas] == sizes


def test_copied_output_grows_no_more() -> None:
    output, deltas = run(TOKENIZER.encode("ab"), {0, 1})
    copy = output.copy()
    output.extend(deltas[0])
    assert copy.outputs[0].token_ids == TOKENIZER.encode("ab")
    assert copy.outputs[0].text == "ab"


def test_grammar_is_compiled_once_per_request() -> None:
    frontend = Frontend(LIMITS, tokenizer=TOKENIZER, clock=lambda: 0.0)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), stop_token_ids=[5])
    with patch.object(Grammars, "check") as check:
        checked = frontend.check_params(params)
        for name in ("a", "b"):
            frontend.open(name, frontend.check([1], checked))
    check.assert_called_once()


def test_submission_ignores_later_changes_of_the_callers_parameters() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    stops, words, bias = [5], ["a"], {3: 1.0}
    params = SamplingParams(
        stop_token_ids=stops,
        bad_words=words,
        logit_bias=bias,
        structured_outputs=StructuredOutputsParams(json=schema),
    )
    frontend = Frontend(LIMITS, tokenizer=TOKENIZER)
    prompt = [1, 2]
    with patch.object(Grammars, "check"):
        [submission] = frontend.open("a", frontend.check(prompt, frontend.check_params(params)))
    before = pickle.dumps(submission)
    schema["properties"]["a"]["type"] = "string"
    for values in (stops, words, prompt):
        values.append(7)
    bias[4] = 2.0
    assert pickle.dumps(submission) == before


@pytest.mark.parametrize("prompt", [[], [256], [-1], [True], [1.0], [1] * 64])
def test_prompt_that_cannot_be_served_is_refused(prompt: list[int]) -> None:
    frontend = Frontend(LIMITS, tokenizer=TOKENIZER)
    with pytest.raises(RequestError):
        frontend.check(prompt, frontend.check_params(SamplingParams()))
