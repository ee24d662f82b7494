"""An engine on several ranks gives the tokens of one rank, for every kind of layer and whatever the cache does.

Ranks are threads here; ``test_rank_processes.py`` has processes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.config import EngineConfig
from strandline.device.sizing import slabs_for
from strandline.engine import llm, loading
from strandline.errors import ConfigError
from tests.cpu.engine.conftest import llm_maker
from tests.cpu.engine.test_bits import MIXTURE, SHORT, traces
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.test_speculation import SPECULATION, Answers, force, record
from tests.cpu.engine.threaded_executor import ThreadedExecutor
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import families

NUM_RANKS = {name: shards[0] for name in families.FAMILIES if (shards := families.CONFIGS[name].shards)}
NUM_RANKS |= {"llama": 4, "mamba2": 4}
"""Families with all kinds of layers, and how many ranks divide them."""

PREEMPTED = ["gpt_oss", "kimi_linear", "nemotron_h", "qwen3_5", "zamba2"]
"""Some of them: keys and values or latents with states of different kinds, or in window blocks."""

GREEDY = SamplingParams(temperature=0, max_tokens=8)
DRAFTING = {"speculative_config": SPECULATION, "memory": "32MiB"}
LONG = SamplingParams(temperature=0, max_tokens=35)
LONGEST = 100

MakeLLM = Callable[..., LLM]


@contextmanager
def making(directory: Path | str, num_ranks: int, **defaults: Any) -> Iterator[MakeLLM]:
    """Yield what makes engines of a model, on one rank, or on several with ``divided``."""
    load_executor, made = loading.load_executor, list[ThreadedExecutor]()

    def load(config: EngineConfig, *arguments: Any, **options: Any) -> Any:
        if config.tensor_parallel_size == 1:
            return load_executor(config, *arguments, **options)
        made.append(ThreadedExecutor(config))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_executor", load)
        patch.setattr(llm, "spawned_workers", lambda _: nullcontext())
        make = llm_maker(Path(directory), patch, **{"device": "cpu", "max_model_len": 512, **defaults})
        yield lambda *, divided=True, **options: make(tensor_parallel_size=num_ranks if divided else 1, **options)
    for executor in made:
        executor.close()


@pytest.fixture(scope="module", params=sorted(NUM_RANKS))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def make_llm(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeLLM]:
    with making(families.save(family, tmp_path_factory.mktemp("ranks")), NUM_RANKS[family]) as make:
        yield make


@pytest.fixture(scope="module")
def recorded(make_llm: MakeLLM) -> tuple[list[list[int]], Answers]:
    """What one rank generates, and what it would be drafted from."""
    llm = make_llm(divided=False, **DRAFTING)
    recorder = record(llm)
    return cached_and_forked(llm), recorder.known


def cached_and_forked(llm: LLM) -> list[list[int]]:
    """Generate after prompts of all lengths, after continued ones, and several outputs of one."""
    prompts = [tokens(count, seed=count) for count in (1, 64, 130)]
    found = answers(llm, prompts, GREEDY)
    found += answers(llm, [prompts[2][:100] + tokens(20, seed=7), prompts[2], prompts[1] + tokens(1)], GREEDY)
    [forked] = llm.generate([tokens(70, seed=9)], SamplingParams(n=2, seed=5, max_tokens=8), use_tqdm=False)
    assert llm.engine.cache.stats().hit_tokens > 0
    return found + [output.token_ids for output in forked.outputs]


def test_several_ranks_give_the_tokens_of_one(make_llm: MakeLLM, recorded: tuple[list[list[int]], Answers]) -> None:
    assert cached_and_forked(make_llm()) == recorded[0]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in families.REPRESENTATIVES else pytest.mark.long)
        for name in sorted(NUM_RANKS)
    ],
    indirect=True,
)
def test_drafts_change_no_token_on_several_ranks(make_llm: MakeLLM, recorded: tuple[list[list[int]], Answers]) -> None:
    expected, known = recorded
    llm = force(make_llm(**DRAFTING), known, [3, 1, 2, 0])
    assert cached_and_forked(llm) == expected
    stats = llm.engine.core.stats().speculation
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("family", PREEMPTED, indirect=True)
def test_preemptions_change_no_token_on_several_ranks(make_llm: MakeLLM) -> None:
    prompts = [tokens(50, seed=seed) for seed in range(3)]
    spec = make_llm().engine.core.spec
    # Room for one request of the longest kind: several begin, and cannot all end in it.
    llm = make_llm(memory=(slabs_for(spec, LONGEST) + 1) * spec.slab_bytes, max_model_len=LONGEST)
    found = answers(llm, prompts, LONG)
    assert llm.engine.scheduler.num_preemptions > 0
    assert found == answers(make_llm(divided=False), prompts, LONG)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_demo_model_answers_alike_on_two_ranks(num_drafts: int) -> None:
    """Its own layer makes the drafts."""
    speculation = {"method": "mtp", "num_speculative_tokens": num_drafts, "adaptive": False} if num_drafts else None
    options = {"speculative_config": speculation, "skip_tokenizer_init": False, "memory": "64MiB", "dtype": "float32"}
    with making("demo", 2, max_model_len=2048, **options) as make:
        question = [{"role": "user", "content": "What is 2 + 3?"}]
        expected, found = (
            [output.outputs[0].text for output in make(divided=divided).chat([question] * 2, use_tqdm=False)]
            for divided in (False, True)
        )
    assert found == expected == ["2 + 3 = 5."] * 2


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bits_depend_on_neither_batch_nor_cache(tmp_path: Path, num_ranks: int) -> None:
    directory = save_tiny_model(tmp_path, linear_num_key_heads=4, **MIXTURE)
    prompts = [tokens(150), tokens(140) + tokens(30, seed=1), tokens(63, seed=2), tokens(129)]
    params = [replace(SHORT, **choice) for choice in ({"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9})]
    with making(directory, num_ranks, deterministic=True) as make:
        cold, llm = make(enable_prefix_caching=False), make(max_num_batched_tokens=100)
        pairs = zip(prompts, params, strict=True)
        expected = [trace for prompt, own in pairs for trace in traces(cold, [prompt], own)]
        assert traces(llm, prompts, params) == expected
        assert traces(llm, prompts[::-1], params[::-1]) == expected[::-1]
    assert llm.engine.cache.stats().hit_tokens > 0


def test_keys_and_values_in_fp8_are_divided_too(model_dir: Path) -> None:
    with making(model_dir, 2, kv_cache_dtype="fp8") as make:
        expected, found = (answers(make(divided=divided), [tokens(100)], GREEDY) for divided in (False, True))
    assert found == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel_size": 5}, "--tensor-parallel-size 5 does not divide the model's 4 key heads of Gated DeltaNet"),
    ({"tensor_parallel_size": 2, "memory": "1TiB"}, "for each of 2 ranks are more than"),
    ({"data_parallel_size": 3, "memory": "1TiB"}, "for each of 3 engines are more than"),
    (
        {"data_parallel_size": 3, "tensor_parallel_size": 2, "memory": "1TiB"},
        "for each of 6 ranks are more than",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_does_not_work_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    directory = save_tiny_model(tmp_path, linear_num_key_heads=4)
    settings = {"model": str(directory), "device": "cpu", "memory": "8MiB", "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=message):
        ThreadedExecutor(EngineConfig(**{**settings, **options}))
