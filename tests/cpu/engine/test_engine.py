"""Ids of requests: one that cannot be used is refused, and nothing else has changed."""

import pytest

from strandline import SamplingParams
from strandline.engine.engine import Engine
from strandline.errors import RequestError
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_exactness import tokens

PROMPT = tokens(30)


def params(num_outputs: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=6, n=num_outputs, ignore_eos=True)


def finish_all(engine: Engine) -> dict[str, list[list[int]]]:
    """Run until nothing is left; return the tokens of every output by request."""
    found = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                found[output.request_id] = [completion.token_ids for completion in output.outputs]
    return found


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        (("a", 2), ("a#1", 1), "a#1"),
        (("a#0", 1), ("a", 2), "a#0"),
        (("a", 1), ("a", 1), "a"),
        (("a", 2), ("a", 1), "a"),
    ],
)
def test_id_that_meets_another_is_refused_without_effect(
    make_llm: MakeLLM, first: tuple[str, int], second: tuple[str, int], taken: str
) -> None:
    alone = make_llm(seed=5).engine
    alone.add_request(first[0], PROMPT, params(first[1]))
    alone.add_request("last", PROMPT, params(1))
    expected = finish_all(alone)
    engine = make_llm(seed=5).engine
    engine.add_request(first[0], PROMPT, params(first[1]))
    with pytest.raises(RequestError, match=f"request id '{taken}' is in use by an unfinished request"):
        engine.add_request(second[0], PROMPT, params(second[1]))
    engine.add_request("last", PROMPT, params(1))
    assert finish_all(engine) == expected
    assert set(expected) == {first[0], "last"}
    engine.add_request(second[0], PROMPT, params(second[1]))
    assert list(finish_all(engine)) == [second[0]]


def test_ids_of_audits_are_reserved(make_llm: MakeLLM) -> None:
    engine = make_llm(audit_rate=1.0).engine
    for name in ("x", "y"):
        engine.add_request(name, PROMPT, params(1))
        with pytest.raises(RequestError, match="'audit of y' is reserved: 'audit of ' begins those of"):
            engine.add_request("audit of y", PROMPT, params(1))
        assert list(finish_all(engine)) == [name]
    while engine.core.has_unfinished:
        engine.step()
    assert engine.core.audits.num_requests == 1
