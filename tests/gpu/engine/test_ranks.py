"""Several GPUs give the tokens of one: all kinds of layers, with graphs and without, with drafts, FP8 and tiers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.cache.evict_all import evict_all
from strandline.config import EngineConfig
from strandline.engine.loading import load_executor
from strandline.models.storage.conversion import convert
from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.engine.test_bits import traces
from tests.cpu.engine.test_deterministic import prompts_that_share
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.test_hand_over import Node, decode, prefill, prompt_of, run
from tests.cpu.engine.test_host_memory import PROMPTS, tier_stats
from tests.cpu.engine.test_ranks import NUM_RANKS
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import families
from tests.gpu.engine.conftest import MAX_NUM_SEQS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
NEEDS_FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")

GREEDY = SamplingParams(temperature=0, max_tokens=16)
TWO_OR_FOUR = [2, pytest.param(4, marks=NEEDS_FOUR)]
DIVIDED = [
    pytest.param(name, num_ranks, marks=[NEEDS_FOUR] if num_ranks == 4 else [])
    for name, num_ranks in sorted(NUM_RANKS.items())
    if name != "qwen3_5"
]
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
}
WIDER = {"num_attention_heads": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
"""Heads that four ranks divide; keys and values are replicated."""


def cached_and_forked(llm: LLM, longest: int = 700) -> list[list[int]]:
    prompts = [tokens(count, seed=count) for count in (1, 64, 130, longest)]
    found = answers(llm, prompts, GREEDY)
    found += answers(llm, [prompts[2][:100] + tokens(20, seed=7), prompts[2], prompts[1] + tokens(1)], GREEDY)
    [forked] = llm.generate([tokens(70, seed=9)], SamplingParams(n=2, seed=5, max_tokens=16), use_tqdm=False)
    assert llm.engine.cache.stats().hit_tokens > 0
    llm.engine.core.close()
    return found + [output.token_ids for output in forked.outputs]


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("num_ranks", TWO_OR_FOUR)
def test_several_gpus_give_the_tokens_of_one(
    tmp_path: Path, changes: dict[str, Any], enforce_eager: bool, num_ranks: int
) -> None:
    directory = str(save_tiny_model(tmp_path, **WIDER, **changes))
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "memory": "64MiB", "enforce_eager": enforce_eager}
    options |= {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": 1024, "skip_tokenizer_init": True}
    sizes = (1, num_ranks)
    expected, found = (cached_and_forked(LLM(directory, tensor_parallel_size=size, **options)) for size in sizes)
    assert found == expected


@pytest.mark.parametrize("num_ranks", TWO_OR_FOUR)
def test_bits_of_several_gpus_are_independent_of_cache_and_batch(tmp_path: Path, num_ranks: int) -> None:
    directory, prompts = str(save_tiny_model(tmp_path, **WIDER, **EXPERTS)), prompts_that_share(5, count=8)
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "memory": "64MiB", "deterministic": True}
    options |= {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": 1024, "skip_tokenizer_init": True}
    with LLM(directory, tensor_parallel_size=num_ranks, enable_prefix_caching=False, **options) as cold:
        expected = [trace for prompt in prompts for trace in traces(cold, [prompt])]
    with LLM(directory, tensor_parallel_size=num_ranks, **options) as llm:
        for _ in range(2):
            assert traces(llm, prompts) == expected
        assert llm.engine.cache.stats().hit_tokens > 0


def test_what_two_gpus_evict_comes_back(tmp_path: Path) -> None:
    directory, cache = str(save_tiny_model(tmp_path)), str(tmp_path / "cache")
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "memory": "64MiB", "tensor_parallel_size": 2}
    options |= {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": 1024, "skip_tokenizer_init": True}
    options |= {"host_memory": "64MiB", "disk_cache": cache}
    with LLM(directory, **options) as first:
        expected = answers(first, PROMPTS)
        evict_all(first.engine.core.cache)
        assert answers(first, PROMPTS) == expected
        host, _ = tier_stats(first)
        assert (host.num_loads > 0, host.num_loaded_bytes > 0) == (True, True)
    with LLM(directory, **options) as second:
        assert answers(second, PROMPTS) == expected
        _, disk = tier_stats(second)
        assert (disk.num_loads > 0, disk.num_loaded_bytes > 0) == (True, True)


def test_prompts_are_handed_over_between_one_gpu_and_two(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path)
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "memory": "64MiB", "max_num_seqs": MAX_NUM_SEQS}
    options |= {"max_model_len": 1024, "skip_tokenizer_init": True}
    configs = [EngineConfig(model=str(directory), tensor_parallel_size=size, **options) for size in (1, 2)]
    one, two = (Node(load_executor(config), directory, **options) for config in configs)
    for giving, fetching, prompt in ((two, one, prompt_of(700)), (one, two, prompt_of(300, seed=2))):
        answer = decode(giving, fetching, prompt, prefill(giving, prompt))
        giving.submit("same", prompt)
        run([giving])
        assert (answer.tokens, answer.hit) == (giving.answers["same"].tokens, len(prompt))
    for node in (one, two):
        node.check_nothing_leaks()
        node.core.close()


@pytest.mark.parametrize(("family", "num_ranks"), DIVIDED)
def test_kinds_of_layers_give_the_tokens_of_one_gpu(tmp_path: Path, family: str, num_ranks: int) -> None:
    directory = str(families.save(family, tmp_path))
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "memory": "64MiB", "max_num_seqs": 8}
    options |= {"max_num_batched_tokens": 256, "max_model_len": 512, "skip_tokenizer_init": True}
    sizes = (1, num_ranks)
    expected, found = (cached_and_forked(LLM(directory, tensor_parallel_size=size, **options), 300) for size in sizes)
    assert found == expected


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("is_fp8", [False, True], ids=["bfloat16", "FP8"])
@pytest.mark.parametrize("num_ranks", TWO_OR_FOUR)
def test_demo_model_answers_on_several_gpus(tmp_path: Path, num_drafts: int, is_fp8: bool, num_ranks: int) -> None:
    """Its own layer makes the drafts."""
    model = "demo"
    if is_fp8:
        convert(DEMO_DIRECTORY, tmp_path / "fp8")
        model = str(tmp_path / "fp8")
    speculation = {"method": "mtp", "num_speculative_tokens": num_drafts, "adaptive": False} if num_drafts else None
    options: dict[str, Any] = {"device": "cuda", "memory": "64MiB", "max_num_seqs": MAX_NUM_SEQS}
    llm = LLM(model, tensor_parallel_size=num_ranks, speculative_config=speculation, **options)
    questions: Any = [[{"role": "user", "content": f"What is {number} + 3?"}] for number in (2, 4)]
    for _ in range(2):  # again from snapshots
        outputs = llm.chat(questions, SamplingParams(temperature=0), use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == ["2 + 3 = 5.", "4 + 3 = 7."]
    assert bool(llm.engine.core.stats().speculation.num_accepted_tokens) == bool(num_drafts)
    llm.engine.core.close()
