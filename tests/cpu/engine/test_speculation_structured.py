"""Drafts under a grammar: with penalties and sampling too, outputs are valid and those of plain decoding."""

import json
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.records.outputs import RequestOutput
from strandline.records.sampling_params import StructuredOutputsParams

NGRAM = {
    "method": "ngram",
    "adaptive": False,
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
MTP = {"method": "mtp", "adaptive": False, "num_speculative_tokens": 3}
DFLASH = {"method": "dflash", "model": "demo", "adaptive": False, "num_speculative_tokens": 7}
SUFFIX = {"method": "suffix", "adaptive": False, "num_speculative_tokens": 6}
NUM_ENTRIES = 2
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Grace", "Edsger"]}, "is_here": {"type": "boolean"}},
        "required": ["name", "is_here"],
        "additionalProperties": False,
    },
    "minItems": NUM_ENTRIES,
    "maxItems": NUM_ENTRIES,
}
PROMPT = 'Copy this list: [{"name": "Ada", "is_here": true}, {"name": "Grace", "is_here": false}]'
SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.9, "seed": 4, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {7: 1.0}},
    {"temperature": 1.0, "seed": 5, "n": 3, "logprobs": 2},
]


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """What plain decoding answers with each sampler."""
    llm = load(None)
    return [answer(llm, options) for options in SAMPLERS]


@pytest.fixture(scope="module")
def speculating(request: pytest.FixtureRequest) -> LLM:
    return load(request.param)


def load(config: dict[str, Any] | None) -> LLM:
    return LLM("demo", memory="64MiB", dtype="float32", device="cpu", speculative_config=config)


def answer(llm: LLM, options: dict[str, Any]) -> RequestOutput:
    params = SamplingParams(max_tokens=300, structured_outputs=StructuredOutputsParams(json=SCHEMA), **options)
    [output] = llm.chat([{"role": "user", "content": PROMPT}], params, use_tqdm=False)
    return output


def test_structured_outputs_with_block_drafts_equal_plain_decoding(expected: list[RequestOutput]) -> None:
    llm = load(DFLASH)
    for options, plain in zip(SAMPLERS, expected, strict=True):
        found = answer(llm, options)
        assert [x.token_ids for x in found.outputs] == [x.token_ids for x in plain.outputs]
        assert found.speculation.num_drafts > 0
    # It was not trained on JSON: few drafts agree.
    assert llm.engine.core.stats().speculation.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("speculating", "options"),
    [
        pytest.param(
            method, options, id=f"{method['method']}-{options}",
            marks=[] if number == 0 or (number + index) % 2 == 0 else pytest.mark.long,
        )
        for number, method in enumerate((NGRAM, MTP, SUFFIX))
        for index, options in enumerate(SAMPLERS)
    ],
    indirect=["speculating"],
)  # fmt: skip
def test_structured_outputs_are_those_of_plain_decoding(
    expected: list[RequestOutput], speculating: LLM, options: dict[str, Any]
) -> None:
    """Ordinary runs draft by n-grams with each sampler, and by each other method with half of them."""
    found = answer(speculating, options)
    assert found.speculation.num_accepted_tokens > 0
    for left, right in zip(expected[SAMPLERS.index(options)].outputs, found.outputs, strict=True):
        assert (left.token_ids, left.text, left.finish_reason) == (right.token_ids, right.text, "stop")
        assert len(json.loads(right.text)) == NUM_ENTRIES
        if right.logprobs is not None:
            assert len(right.logprobs) == len(right.token_ids)
