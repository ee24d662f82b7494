"""Sliding windows in the engine: memory stays bounded, what is cached is hit, and tokens are the same.

Freed memory is NaN here, so that a kernel that reads behind a window changes the tokens.
"""

from pathlib import Path

import pytest

from strandline import LLM, SamplingParams
from strandline.cache.evict_all import evict_all
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, BehindWindows
from strandline.cache.resume import first_block_seen
from strandline.engine.loading import load_uni_executor
from strandline.ids import BLOCK_TOKENS
from strandline.specs import ModelSpec
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_disk_cache import disk_of, settle
from tests.cpu.engine.test_exactness import GREEDY, answers, tokens
from tests.cpu.engine.test_hand_over import NUM_TOKENS, Node, config_of, decode, prefill
from tests.cpu.models import families

WINDOW_TOKENS = 70
LONG = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save("recurrent_gemma-odd", tmp_path_factory.mktemp("windows"))


@pytest.fixture
def make_llm(directory: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    return llm_maker(directory, monkeypatch, device="cpu")


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 65])
def test_long_answers_and_next_turns_are_those_of_kept_keys(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, max_num_batched_tokens: int
) -> None:
    found = []
    for keeps in (False, True):
        with monkeypatch.context() as patch:
            if keeps:
                patch.setattr(ModelSpec, "window_tokens", None)
            llm = make_llm(memory="8MiB", max_num_batched_tokens=max_num_batched_tokens)
        rule = llm.engine.cache.internals().rule
        assert rule == (AT_SNAPSHOTS if keeps else BehindWindows(WINDOW_TOKENS))
        first = tokens(300)
        [output] = llm.generate([first], LONG, use_tqdm=False)
        assert (num_blocks(llm) < 550 // BLOCK_TOKENS) == (not keeps)
        longer = [*first, *output.outputs[0].token_ids, *tokens(5, seed=1)]
        again = llm.generate([longer, [*first[:200], *tokens(50, seed=2)]], LONG, use_tqdm=False)
        assert again[0].num_cached_tokens == 549
        found.append([output.outputs[0].token_ids, *(each.outputs[0].token_ids for each in again)])
    assert found[0] == found[1]


def num_blocks(llm: LLM) -> int:
    """Return how many blocks the device holds."""
    return llm.engine.cache.memory_use().num_blocks


LENGTHS = (500, 321, 320, 130)
PROMPTS = [tokens(count, seed=count) for count in LENGTHS]
NEEDED_BLOCKS = sum(-(-count // BLOCK_TOKENS) - first_block_seen(count, WINDOW_TOKENS) for count in LENGTHS)


def serve(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return answers and hits of prompts that come one after the other."""
    outputs = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in outputs], [output.num_cached_tokens for output in outputs]


@pytest.fixture
def expected(make_llm: MakeLLM) -> list[list[int]]:
    return answers(make_llm(enable_prefix_caching=False), PROMPTS)


def test_windows_come_back_from_host_memory(make_llm: MakeLLM, expected: list[list[int]]) -> None:
    llm = make_llm(host_memory="8MiB")
    cache = llm.engine.core.cache
    assert serve(llm, PROMPTS) == (expected, [0] * len(PROMPTS))
    evict_all(cache)
    [host] = llm.engine.core.loads.stats()
    assert (num_blocks(llm), host.num_snapshots) == (0, 2 * len(PROMPTS))
    assert serve(llm, PROMPTS) == (expected, list(LENGTHS))
    loads = cache.stats().loads
    assert (loads.num_done, loads.num_snapshots) == (len(PROMPTS), len(PROMPTS))
    assert loads.num_blocks == NEEDED_BLOCKS, "nothing comes back from behind the windows"
    assert num_blocks(llm) <= NEEDED_BLOCKS + len(PROMPTS), "and nothing stays there"


def test_windows_come_back_from_files_after_a_restart(
    make_llm: MakeLLM, tmp_path: Path, expected: list[list[int]]
) -> None:
    directory = str(tmp_path / "cache")
    with make_llm(disk_cache=directory) as first:
        assert serve(first, PROMPTS[:2]) == (expected[:2], [0, 0])
        evict_all(first.engine.core.cache)
        settle(first)
        assert disk_of(first).num_snapshots == 4
        assert serve(first, PROMPTS[:2]) == (expected[:2], list(LENGTHS[:2]))
        assert disk_of(first).num_loads == 2
        assert serve(first, PROMPTS[2:]) == (expected[2:], [0, 0]), "what these leave is flushed"
    with make_llm(disk_cache=directory) as second:
        assert serve(second, PROMPTS) == (expected, list(LENGTHS))
        assert disk_of(second).num_loads == len(PROMPTS)
        assert second.engine.core.cache.stats().loads.num_blocks == NEEDED_BLOCKS


def test_windows_are_fetched_from_another_engine(make_llm: MakeLLM, directory: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = answers(make_llm(enable_prefix_caching=False), PROMPTS, params)
    producer, consumer = (Node(load_uni_executor(config_of(directory)), directory) for _ in range(2))
    for count, prompt, answer in zip(LENGTHS, PROMPTS, expected, strict=True):
        found = decode(producer, consumer, prompt, prefill(producer, prompt))
        assert (found.tokens, found.hit, found.lost) == (answer, count, 0)
    assert consumer.cache.stats().loads.num_blocks == NEEDED_BLOCKS
    for node in (producer, consumer):
        assert node.cache.memory_use().num_blocks <= NEEDED_BLOCKS + len(PROMPTS)
        node.check_nothing_leaks()
        assert node.core.hand_over is not None
        node.core.hand_over.close()
