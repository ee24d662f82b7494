"""Deterministic engines give the same bits for every family: alone or batched, in steps of any size, resumed or not.

Tokens and log-probabilities are compared without tolerances. All families run in float32: rounding to bfloat16 can hide
differences in a tiny model. One family for each kind of layer runs in bfloat16, too; with ``--long``, all families and
their unusual configurations do. ``test_bits.py`` tests more, on Qwen3.5.
"""

from collections.abc import Iterator

import pytest

from strandline import LLM, SamplingParams
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_bits import Trace, traces
from tests.cpu.engine.test_exactness import tokens
from tests.cpu.models import families

HEAD = tokens(200)
PROMPTS = [[*HEAD[:140], *tokens(5, seed=1)], [*HEAD, *tokens(65, seed=2)], tokens(63, seed=3), HEAD[:129]]
"""Share 128 tokens or more, but for one; they end in the middle of a block and next to its ends."""
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=6, logprobs=3, ignore_eos=True)

ORDINARY = [(name, "float32") for name in families.FAMILIES]
ORDINARY += [(name, "bfloat16") for name in families.REPRESENTATIVES]
CASES = [
    pytest.param((name, dtype), marks=[] if (name, dtype) in ORDINARY else pytest.mark.long)
    for name in families.CONFIGS
    for dtype in ("float32", "bfloat16")
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A configuration, and the dtype of its weights."""
    name, dtype = request.param
    return name, dtype


@pytest.fixture(scope="module")
def make_exact(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeLLM]:
    directory = families.save(case[0], tmp_path_factory.mktemp("families"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield llm_maker(directory, monkeypatch, deterministic=True, device="cpu", dtype=case[1], memory="32MiB")


@pytest.fixture(scope="module")
def expected(make_exact: MakeLLM) -> Trace:
    """What each prompt gives alone, without a cache."""
    llm = make_exact(enable_prefix_caching=False)
    return [trace for prompt in PROMPTS for trace in traces(llm, [prompt], SAMPLED)]


def check_cold_and_resumed(llm: LLM, expected: Trace) -> None:
    """Compare all prompts at once: when nothing is cached, then resumed after their whole blocks, in another order."""
    assert traces(llm, PROMPTS, SAMPLED) == expected
    before = llm.engine.cache.stats().hit_tokens
    assert traces(llm, PROMPTS[::-1], SAMPLED) == expected[::-1]
    assert llm.engine.cache.stats().hit_tokens - before == 128 + 256 + 0 + 128


def test_bits_depend_on_neither_batch_nor_cache(make_exact: MakeLLM, expected: Trace) -> None:
    check_cold_and_resumed(make_exact(), expected)


def test_bits_do_not_depend_on_how_prompts_are_split(make_exact: MakeLLM, expected: Trace) -> None:
    check_cold_and_resumed(make_exact(max_num_batched_tokens=100), expected)
