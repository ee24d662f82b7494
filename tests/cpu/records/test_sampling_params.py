"""Invalid sampling parameters are refused with the value and the limits."""

from typing import Any

import numpy as np
import pytest

from strandline import SamplingParams
from strandline.errors import RequestError
from strandline.records.sampling_params import StructuredOutputsParams

BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": float("nan")}, "temperature must be a number between 0 and 1000000, got nan"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0.0}, "top_p must be above 0"),
    ({"top_p": 1.1}, "top_p must be a number between 0 and 1, got 1.1"),
    ({"top_k": -2}, "top_k must be a whole number of at least -1, got -2"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be a number between 0.001 and 1000, got 0.0"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"temperature": 1e308}, "temperature must be a number between 0 and 1000000"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"n": 0}, "n must be a whole number between 1"),
    (
        {"n": 2, "temperature": 0},
        "got 2: all outputs would be equal; temperature is 0, which is the model's default if",
    ),
    ({"max_tokens": -1}, "max_tokens must be a whole number of at least 0, got -1"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is above max_tokens 4"),
    ({"logprobs": 21}, "logprobs must be a whole number between 0 and 20, got 21"),
    ({"prompt_logprobs": -2}, "prompt_logprobs must be a whole number between -1 and 20, got -2"),
    ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids must be a whole number of at least 0, got -1"),
    ({"allowed_token_ids": 3}, "allowed_token_ids must be a list of token ids, got 3"),
    ({"logprob_token_ids": []}, "logprob_token_ids must hold between 1 and 128 token ids, got 0"),
    ({"logprob_token_ids": [1] * 129}, "logprob_token_ids must hold between 1 and 128 token ids, got 129"),
    ({"logprob_token_ids": [-1]}, "logprob_token_ids must be a whole number of at least 0, got -1"),
    ({"logprob_token_ids": [True]}, "logprob_token_ids must be a whole number of at least 0, got True"),
    ({"logprob_token_ids": 3}, "logprob_token_ids must be a list of token ids, got 3"),
    (
        {"seed": 2**63},
        "seed must be a whole number between -9223372036854775808 and 9223372036854775807, got 9223372036854775808",
    ),
    ({"max_tokens": 2**64}, "max_tokens must be a whole number between 0 and 9223372036854775807, got 184467"),
    ({"top_k": 2**63}, "top_k must be a whole number between -1 and 9223372036854775807, got 9223372036854775808"),
    ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
    ({"stop_token_ids": "x"}, "stop_token_ids must be a list of token ids, got 'x'"),
    ({"bad_words": "x"}, "bad_words must be a list of strings, got 'x'"),
    ({"logit_bias": [1]}, "logit_bias must be a mapping from token ids to numbers, got [1]"),
    ({"stop": [""]}, "stop must hold non-empty strings"),
    ({"stop": ["a"], "detokenize": False}, "stop strings need detokenize=True"),
    ({"stop_token_ids": [-1]}, "stop_token_ids must be a whole number of at least 0, got -1"),
    ({"bad_words": [""]}, "bad_words"),
    ({"logit_bias": {3: 101.0}}, "logit_bias of token 3 must be a number between -100 and 100, got 101.0"),
    ({"logit_bias": {-3: 1.0}}, "logit_bias token"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=[str(values) for values, _ in BAD])
def test_a_value_out_of_range_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert message in str(caught.value)
    if "detokenize" not in values:
        assert caught.value.param in values


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter 'temprature'; did you mean 'temperature'"):
        SamplingParams.from_mapping({"temprature": 0.5})


def test_known_names_are_taken_from_a_mapping() -> None:
    params = SamplingParams.from_mapping({"temperature": 0.5, "stop": "end"})
    assert params == SamplingParams(temperature=0.5, stop="end")
    assert params.stop_strings == ("end",)


def test_values_may_be_those_of_numpy() -> None:
    given: dict[str, Any] = {
        "temperature": np.float32(0.5),
        "top_p": np.float64(0.5),
        "seed": np.int64(3),
        "ignore_eos": np.bool_(True),
    }
    given |= {"stop_token_ids": np.array([1, 2]), "allowed_token_ids": [np.int32(4)], "logit_bias": {np.int64(5): 1.0}}
    params = SamplingParams(**given)
    plain: dict[str, Any] = {"temperature": 0.5, "top_p": 0.5, "seed": 3, "ignore_eos": True}
    plain |= {"stop_token_ids": [1, 2], "allowed_token_ids": [4], "logit_bias": {5: 1.0}}
    assert repr(params) == repr(SamplingParams(**plain))  # equal values may have other types


def test_a_very_low_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_clone_shares_no_container() -> None:
    schema = {"type": "object"}
    params = SamplingParams(stop=["x"], structured_outputs=StructuredOutputsParams(json=schema), seed=1)
    clone = params.clone()
    assert clone == params
    assert clone.stop_strings == ("x",)
    assert isinstance(clone.stop, list)
    clone.stop.append("y")
    schema["type"] = "array"
    assert (params.stop, clone.structured_outputs) == (["x"], StructuredOutputsParams(json={"type": "object"}))
